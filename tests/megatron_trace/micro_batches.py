"""Running the tiny model on a few sequences, packed or padded, guided or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from reference_rollout import HF_CONFIG, SHAPE, ReferenceRollout, Weights
from torch import Tensor

from bridge.client.records import TrajectoryRecords
from bridge.layout import RecordLayout, Site
from megatron_trace import Guidance, GuidedMicroBatch, guide

ALL_LAYERS = tuple(range(SHAPE.num_layers))
FULL_LAYOUT = RecordLayout(SHAPE, ALL_LAYERS, tuple(Site), bits=4)

Records = Sequence[TrajectoryRecords | None]


def random_sequences(*lengths: int, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocabulary = HF_CONFIG["vocab_size"]
    return [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]


def roll_out(
    weights: Weights,
    sequences: Sequence[Tensor],
    noise: float = 0.0,
    layout: RecordLayout = FULL_LAYOUT,
) -> tuple[list[TrajectoryRecords], list[Tensor]]:
    """Return each sequence's records and logits."""
    engine = ReferenceRollout(weights, layout, noise)
    pairs = [engine.run(tokens, f"t{i}") for i, tokens in enumerate(sequences)]
    return [records for records, _ in pairs], [logits for _, logits in pairs]


def consumed(sequences: Sequence[Tensor]) -> Tensor:
    """Say which of the packed tokens have a record: all but each sequence's last."""
    return torch.cat([torch.arange(len(tokens)) < len(tokens) - 1 for tokens in sequences])


def cumulative_lengths(sequences: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)


def packed(
    records: Records, sequences: Sequence[Tensor], version: str | None = "1", **guidance: Any
) -> GuidedMicroBatch:
    return GuidedMicroBatch.from_records(
        records,
        torch.cat(list(sequences))[None],
        cu_seqlens=cumulative_lengths(sequences),
        weight_version=version,
        guidance=Guidance(**guidance),
    )


def packed_logits(
    model: Any, sequences: Sequence[Tensor], micro_batch: GuidedMicroBatch | None
) -> Tensor:
    """Return the logits of all tokens: [t, vocabulary]."""
    cu_seqlens = cumulative_lengths(sequences)
    longest = max(map(len, sequences))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    tokens = torch.cat(list(sequences))[None]
    positions = torch.cat([torch.arange(len(t)) for t in sequences])[None]
    with guide(micro_batch):
        return model(tokens, positions, None, packed_seq_params=params)[0]


def pad(sequences: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


def padded(
    records: Records, sequences: Sequence[Tensor], version: str | None = "1", **guidance: Any
) -> GuidedMicroBatch:
    return GuidedMicroBatch.from_records(
        records,
        pad(sequences),
        lengths=list(map(len, sequences)),
        weight_version=version,
        guidance=Guidance(**guidance),
    )


def padded_logits(
    model: Any, sequences: Sequence[Tensor], micro_batch: GuidedMicroBatch | None
) -> Tensor:
    """Return the logits of the real tokens, in packed order: [t, vocabulary]."""
    tokens = pad(sequences)
    length = tokens.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(length).expand_as(tokens)
    with guide(micro_batch):
        logits_bsv = model(tokens, positions, future)
    return torch.cat([row[: len(t)] for row, t in zip(logits_bsv, sequences, strict=True)])


def loss_of(logits: Tensor, sequences: Sequence[Tensor]) -> Tensor:
    """Return a loss that every logit of a recorded position contributes to."""
    targets = torch.roll(torch.cat(list(sequences)), -1)
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return losses[consumed(sequences)].mean()


def gradients(model: Any) -> dict[str, Tensor]:
    """Return copies of the parameters' gradients, and clear them."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads
