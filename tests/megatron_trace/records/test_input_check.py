"""The model must be given the tokens, the order and the form that the micro-batch describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.errors import TokenMismatch
from bridge.layout import Site

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(6, 6, 4)


@pytest.fixture(scope="module")
def rollout(lib: Any, weights: Weights, sequences: list[Tensor]) -> Any:
    return lib.roll_out(weights, sequences)


@pytest.fixture(scope="module")
def model(build_fp4: Callable[..., Any]) -> Any:
    return build_fp4()


def run_packed(
    model: Any, micro_batch: Any, tokens: Tensor, bounds: Sequence[int] | None
) -> Tensor:
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_trace import guide

    params = None
    if bounds is not None:
        cu = torch.tensor(bounds, dtype=torch.int32)
        longest = int(cu.diff().max())
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    positions = torch.zeros_like(tokens)
    with guide(micro_batch):
        return model(tokens, positions, None, packed_seq_params=params)


def test_sequences_in_another_order_are_refused(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    records, _ = rollout
    swapped = [sequences[1], sequences[0], sequences[2]]
    for run, build in ((lib.packed_logits, lib.packed), (lib.padded_logits, lib.padded)):
        with pytest.raises(TokenMismatch, match="same sequences in the same order as the records"):
            run(model, swapped, build(records, sequences))


@given(place=st.integers(0, 15), step=st.integers(1, 95))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_one_other_token_is_refused_and_named(
    lib: Any, model: Any, sequences: Any, rollout: Any, place: int, step: int
) -> None:
    records, _ = rollout
    tokens = torch.cat(sequences)
    tokens[place] = (tokens[place] + step) % 96
    with pytest.raises(TokenMismatch, match=f"token {int(tokens[place])} at place {place} "):
        run_packed(model, lib.packed(records, sequences), tokens[None], (0, 6, 12, 16))


@pytest.mark.parametrize("bounds", [(0, 6, 10, 16), (0, 6, 16), (0, 6, 12, 15), (0, 12, 16, 16)])
def test_other_sequence_bounds_over_the_same_tokens_are_refused(
    lib: Any, model: Any, sequences: Any, rollout: Any, bounds: tuple[int, ...]
) -> None:
    from megatron_trace.records.input_check import FormMismatch

    records, _ = rollout
    with pytest.raises(FormMismatch, match="pass the same cu_seqlens to both"):
        run_packed(model, lib.packed(records, sequences), torch.cat(sequences)[None], bounds)


def test_a_pack_that_runs_as_one_sequence_is_refused(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace.records.input_check import FormMismatch

    records, _ = rollout
    with pytest.raises(FormMismatch, match=r"packs 3 sequences .* no packed_seq_params"):
        run_packed(model, lib.packed(records, sequences), torch.cat(sequences)[None], None)


def test_packed_and_padded_forms_are_not_exchanged(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace.records.input_check import FormMismatch

    records, _ = rollout
    one, of_one = [sequences[0]], records[:1]
    with pytest.raises(FormMismatch, match="describes a padded batch"):
        lib.packed_logits(model, one, lib.padded(of_one, one))
    # Two rows of six tokens are as many tokens as a pack of twelve.
    two, of_two = sequences[:2], records[:2]
    with pytest.raises(FormMismatch, match="2 sequences side by side"):
        lib.padded_logits(model, two, lib.packed(of_two, two))


def test_a_pack_of_one_sequence_needs_no_bounds(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    records, logits = rollout
    micro_batch = lib.packed(records[:1], sequences[:1])
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    from megatron_trace import guide

    with guide(micro_batch):
        ours = model(sequences[0][None], torch.arange(6)[None], future)[0]
    torch.testing.assert_close(ours[:-1], logits[0][:-1], rtol=1e-3, atol=1e-3)


def test_what_stands_in_the_padding_does_not_matter(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace import guide

    records, _ = rollout
    micro_batch = lib.padded(records, sequences)
    tokens = lib.pad(sequences)
    tokens[2, 4:] = 7
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)[None, None]
    with guide(micro_batch):
        model(tokens, torch.arange(6).expand_as(tokens), future)
    assert micro_batch.report().total().guided > 0


def test_a_pad_sequence_at_the_end_of_a_pack_has_no_record(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace import GuidedMicroBatch

    records, logits = rollout
    tokens = torch.cat([*sequences, torch.zeros(4, dtype=torch.int64)])[None]
    bounds = (0, 6, 12, 16, 20)
    micro_batch = GuidedMicroBatch.from_records(
        records, tokens, cu_seqlens=bounds, pad_sequence=True, weight_version="1"
    )
    ours = run_packed(model, micro_batch, tokens, bounds)[0][:16]
    known = lib.consumed(sequences)
    torch.testing.assert_close(ours[known], torch.cat(logits)[known], rtol=1e-3, atol=1e-3)
    assert micro_batch.report().total().missing == 0


def test_a_pad_sequence_that_is_not_announced_gets_a_sentence(
    lib: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace import GuidedMicroBatch
    from megatron_trace.records.aligned_rows import SequenceCountMismatch
    from megatron_trace.records.microbatch import MissingRecords

    records, _ = rollout
    tokens = torch.cat([*sequences, torch.zeros(4, dtype=torch.int64)])[None]
    for given_records, error in (
        (records, SequenceCountMismatch),
        ([*records, None], MissingRecords),
    ):
        with pytest.raises(error, match="pad_sequence=True"):
            GuidedMicroBatch.from_records(
                given_records, tokens, cu_seqlens=(0, 6, 12, 16, 20), weight_version="1"
            )


def test_embeddings_in_the_place_of_tokens_are_refused(
    lib: Any, model: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace import guide
    from megatron_trace.records.input_check import FormMismatch

    records, _ = rollout
    embedded = torch.zeros(16, 1, SHAPE.hidden_size)
    with pytest.raises(FormMismatch, match="pass input_ids"), guide(lib.packed(records, sequences)):
        model(None, None, None, decoder_input=embedded)


def test_a_later_stage_compares_what_it_can_see(
    lib: Any, build: Callable[..., Any], sequences: Any, rollout: Any
) -> None:
    """A stage without the embedding: the tokens where they are passed, else shape and bounds."""
    from megatron_trace import enable_fp4, guide
    from megatron_trace.parallel import TokenCountMismatch
    from megatron_trace.records.input_check import FormMismatch

    records, _ = rollout
    model = build()
    model.pre_process = model.decoder.pre_process = False
    enable_fp4(model)
    micro_batch = lib.packed(records, sequences)

    def run(tokens: Tensor | None, *shape: int) -> None:
        model.set_input_tensor(torch.zeros(*shape, SHAPE.hidden_size))
        with guide(micro_batch):
            model(tokens, None, None)

    with pytest.raises(TokenMismatch):
        run(torch.cat(sequences[::-1])[None], 16, 1)
    with pytest.raises(FormMismatch, match="no packed_seq_params"):
        run(None, 16, 1)
    with pytest.raises(FormMismatch, match="2 sequences side by side"):
        run(None, 8, 2)
    with pytest.raises(TokenCountMismatch, match="computes 12 tokens"):
        run(None, 12, 1)


def test_a_rank_of_sequence_parallelism_sees_its_part_of_the_tokens(
    lib: Any, sequences: Any, rollout: Any
) -> None:
    from megatron_trace.parallel import TokenCountMismatch

    records, _ = rollout
    check = lib.padded(records, sequences, sites=(Site.FC1,)).check
    check.check_form(torch.zeros(3, 3, 8), None, 2)
    with pytest.raises(TokenCountMismatch, match=r"computes 36 tokens, .* describes 18"):
        check.check_form(torch.zeros(6, 3, 8), None, 2)
