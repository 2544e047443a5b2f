"""Run guided training steps under every parallel layout, and write what each computed.

Started on two and on four ranks by `megatron_trace.launch`. Every layout trains on the same four
micro-batches with the same forged records; the first layout of two ranks is one rank alone, the
others must agree with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from grouped_linear import grouped_experts
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from micro_batches import FULL_LAYOUT, pad, random_sequences
from reference_rollout import HF_CONFIG, SHAPE, make_records, random_weights
from torch import Tensor

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.fp4.nvfp4 import encode_e4m3
from bridge.layout import Part, RecordLayout, Site
from bridge.producer.producer import RecordProducer
from megatron_trace import (
    Guidance,
    GuidedMicroBatch,
    TraceTrainerConfig,
    enable_fp4,
    fetch_records,
    guide,
)
from megatron_trace.hf import build_model, load_hf, transformer_config
from megatron_trace.hf.local_part import LocalPart
from megatron_trace.hf.mapping import split, unshard
from megatron_trace.parallel import ContextParallel
from megatron_trace.telemetry.report import Report

Batches = Iterable[tuple[list[Tensor], Any]]

LENGTHS = (7, 12, 9, 12, 12, 5, 10, 12)
PER_MICRO_BATCH = 2
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERT = {"expert_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
GROUPED = {"moe_grouped_gemm": True}

CONTEXT = {"context_parallel_size": 2}
# gloo gathers no parts of different sizes, which experts that are split over tensor ranks need.
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
EXPERT_OF_FOUR = {"expert_model_parallel_size": 4} | WHOLE_EXPERTS

TWO_RANKS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "expert": EXPERT,
    "expert, allgather": EXPERT | ALLGATHER,
    "tensor": TENSOR,
    "tensor, fetched": TENSOR,
    "tensor, allgather": TENSOR | ALLGATHER,
    "tensor and expert": TENSOR | EXPERT | WHOLE_EXPERTS,
    "context": CONTEXT,
    "context, recomputed": CONTEXT | FULL_RECOMPUTE,
    "context and expert": CONTEXT | EXPERT,
    "context and expert, allgather": CONTEXT | EXPERT | ALLGATHER,
    "pipeline": PIPELINE | FULL_RECOMPUTE,
    "interleaved pipeline": PIPELINE
    | FULL_RECOMPUTE
    # Batched transfers between two ranks that are each other's next and previous stage are told
    # apart by NCCL's order of posting, which gloo does not have.
    | {"virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": False},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "expert of four": EXPERT_OF_FOUR,
    "tensor and expert of four": TENSOR | EXPERT_OF_FOUR,
    "tensor by expert": TENSOR | EXPERT | WHOLE_EXPERTS,
    "context by tensor": CONTEXT | TENSOR,
    "context by tensor and expert": CONTEXT | TENSOR | EXPERT | WHOLE_EXPERTS,
    "context, tensor and expert of four": CONTEXT | TENSOR | EXPERT_OF_FOUR,
    "context by pipeline": CONTEXT | PIPELINE | FULL_RECOMPUTE,
    "pipeline by expert": PIPELINE | EXPERT | FULL_RECOMPUTE,
    "pipeline by tensor": PIPELINE | TENSOR | FULL_RECOMPUTE,
}


def with_grouped(layouts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every layout with sequential experts, and with grouped ones."""
    grouped = {f"{name}, grouped": layout | GROUPED for name, layout in layouts.items()}
    return layouts | grouped


LAYOUTS = {2: with_grouped(TWO_RANKS), 4: with_grouped(FOUR_RANKS)}

# Two bits of a scale are read beside the block that the rank itself computes.
LOW_SCALES = ("one rank", "expert", "tensor", "context, grouped")


def forged_records(sequences: list[Tensor], record: RecordLayout) -> list[Any]:
    """Records that have nothing to do with the values: a row mixed up would show everywhere."""
    generator = torch.Generator().manual_seed(9)

    def codes(*shape: int) -> Tensor:
        return torch.randint(16, shape, generator=generator, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return encode_e4m3(0.1 + torch.rand(shape, generator=generator))

    records = []
    for i, tokens in enumerate(sequences):
        t, k = len(tokens), SHAPE.top_k
        forward = torch.zeros(t, record.row_bytes(Part.FORWARD), dtype=torch.uint8)
        kv = torch.zeros(t, record.row_bytes(Part.KV), dtype=torch.uint8)
        for layer in range(SHAPE.num_layers):
            ids = torch.rand(t, SHAPE.num_experts, generator=generator).topk(k)[1]
            record.write_routes(forward, layer, ids)
            for site, rows, slots in (
                (Site.FC1, forward, ()),
                (Site.FC2, forward, (k,)),
                (Site.K, kv, ()),
                (Site.V, kv, ()),
            ):
                n = record.width(site)
                token_scale = torch.ones(t, *slots, 1) if rows is forward else None
                record.write_site(
                    rows, site, layer, codes(t, *slots, n), scales(t, *slots, n // 16), token_scale
                )
        records.append(make_records(tokens, f"t{i}", record, forward, kv))
    return records


def micro_batches_of_this_rank(count: int, scale_bits: int) -> Iterator[tuple[list[Tensor], Any]]:
    """Yield this data-parallel rank's sequences and records, micro-batch by micro-batch."""
    sequences = random_sequences(*LENGTHS)
    records = forged_records(sequences, replace(FULL_LAYOUT, scale_bits=scale_bits))
    size = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    for i in range(count):
        first = (i * size + rank) * PER_MICRO_BATCH
        chosen = slice(first, first + PER_MICRO_BATCH)
        yield sequences[chosen], records[chosen]


def guided_batch(sequences: list[Tensor], records: Any) -> tuple[Any, Any, Tensor]:
    """Line up one micro-batch; all of a schedule are padded to one shape."""
    tokens = pad([torch.zeros(max(LENGTHS), dtype=torch.int64), *sequences])[1:]
    micro_batch = GuidedMicroBatch.from_records(
        records,
        tokens,
        lengths=list(map(len, sequences)),
        weight_version="1",
        guidance=Guidance(compare=True),
    )
    return sequences, micro_batch, tokens


def fetched(batches: Batches, models: list[Any]) -> Batches:
    """The same batches with the records as a bridge sends them to this rank."""
    bridge = spawn.start()
    with RecordProducer(bridge.endpoint) as producer, TraceClient(bridge.endpoint) as client:
        producer.register("engine", FULL_LAYOUT)
        first = 0
        for sequences, records in batches:
            for tokens, record in zip(sequences, records, strict=True):
                rows = torch.arange(first, first + len(tokens) - 1)
                producer.send_rows(Part.FORWARD, rows, record.forward[:-1], "1")
                producer.send_rows(Part.KV, rows, record.kv[:-1], "1")
                every_row = torch.cat((rows, torch.tensor([-1])))
                producer.send_trajectory(record.trajectory, 0, tokens, every_row, "finished")
                first += len(rows)
        producer.flush()
        for sequences, records in batches:
            names = [record.trajectory for record in records]
            own = fetch_records(client, names, Guidance(compare=True), models)
            assert own[0].kv.shape[1] * 2 == records[0].kv.shape[1], "half of the heads"
            yield sequences, own
    bridge.stop()


def train_step(batches: Batches, models: list[Any], count: int) -> tuple[float, Report]:
    """Forward and backward of `count` micro-batches; loss and counts summed over ranks."""
    losses: list[float] = []
    context = ContextParallel.current()

    def forward_step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        sequences, micro_batch, tokens = next(data)
        length = tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        positions = torch.arange(length).expand_as(tokens)
        known = torch.stack([torch.arange(length) < len(t) - 1 for t in sequences])
        labels = torch.roll(tokens, -1, 1)
        mine = context.kept([0, length])
        tokens, positions, labels, known = (
            each[:, mine] for each in (tokens, positions, labels, known)
        )
        with guide(micro_batch):
            out = model(tokens, positions, future, labels=labels)

        def loss_of(loss_bs: Tensor) -> tuple[Tensor, dict[str, float]]:
            loss = loss_bs[known].sum()
            losses.append(loss.item())
            # The schedule divides by the number of micro-batches, and multiplies by context ranks.
            return loss * count / context.size, {}

        return out, loss_of

    batches = [guided_batch(*batch) for batch in batches]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in models] if len(models) > 1 else iter(batches),
        model=models if len(models) > 1 else models[0],
        num_microbatches=count,
        seq_length=max(LENGTHS),
        micro_batch_size=PER_MICRO_BATCH,
        forward_only=False,
    )
    reports = [micro_batch.report(dist.group.WORLD) for _, micro_batch, _ in batches]
    total = torch.tensor([sum(losses)], dtype=torch.float64)
    dist.all_reduce(total)
    return total.item(), sum(reports[1:], reports[0])


def whole_gradients(model: Any) -> dict[str, Tensor]:
    """Return this stage's gradients as whole Hugging Face tensors, summed over all data."""
    part = LocalPart(model)
    grads: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        source = part.source(name)
        replicas = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if source.expert is None
            else parallel_state.get_expert_data_parallel_group()
        )
        grad = parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        dist.all_reduce(grad, group=replicas)
        group = part.tensor_group(source)
        shards = [torch.empty_like(grad) for _ in range(group.size())]
        dist.all_gather(shards, grad, group=group)
        whole = unshard(source, shards)
        grads |= dict(zip(source.names, split(source, whole, model.config), strict=True))
    return grads


def run_layout(
    layout: dict[str, Any], scale_bits: int, through_bridge: bool
) -> tuple[float, Report, dict[str, Tensor]]:
    sizes = {name: size for name, size in layout.items() if name.endswith("_parallel_size")}
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = transformer_config(HF_CONFIG, variable_seq_lengths=False, **layout)
    stages = layout.get("virtual_pipeline_model_parallel_size")
    with grouped_experts() if config.moe_grouped_gemm else nullcontext():
        models = [
            build_model(HF_CONFIG, config, vp_stage=stage if stages else None)
            for stage in range(stages or 1)
        ]
    for model in models:
        load_hf(model, random_weights())
        model.train()
    enable_fp4(models, TraceTrainerConfig(weight_dtype=torch.float32))
    data_ranks = parallel_state.get_data_parallel_world_size()
    count = len(LENGTHS) // PER_MICRO_BATCH // data_ranks
    batches: Batches = list(micro_batches_of_this_rank(count, scale_bits))
    if through_bridge:
        batches = fetched(batches, models)
    loss, report = train_step(batches, models, count)
    grads = {}
    for model in models:
        grads |= whole_gradients(model)
    parallel_state.destroy_model_parallel()
    return loss, report, grads


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layouts = LAYOUTS[dist.get_world_size()]
    runs = [(name, layout, 8) for name, layout in layouts.items()]
    low = [name for name in LOW_SCALES if name in layouts]
    runs += [(f"{name}, low scales", layouts[name], 2) for name in low]
    for name, layout, scale_bits in runs:
        loss, report, grads = run_layout(layout, scale_bits, through_bridge="fetched" in name)
        counts = {f"{site} {layer}": asdict(c) for (site, layer), c in report.counts.items()}
        # Every tensor-parallel rank computes the same loss; a pipeline has it on its last stage.
        copies = layout.get("tensor_model_parallel_size", 1)
        result = {"loss": loss / copies, "counts": counts}
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))
        torch.save(grads, out / f"{name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
