"""How long the FP4 kernels take on a GPU, beside the least that their bytes could take.

Shape of Qwen3-30B-A3B: hidden 2048, expert width 768, 128 experts, 8 a token. Every figure is the
median of CUDA-graph replays, divided by the calls in the graph. The calls rotate among input sets,
four times the L2 cache together where a set is large enough; decode-sized activations are smaller
and stay cached, as they are in an engine (`cached` says which).

The byte limit is what an elementwise kernel moves in the same run. Baselines: the plain torch
reference for the quantizers, and for the experts a grouped GEMM of the same structure on BF16
weights, torch's own grouped GEMM, and SGLang's Marlin on the same FP4 weights (needs sglang 0.5.17
and nvcc; it is checked against the exact products first, and is a row with the reason where it
cannot run).
"""

from __future__ import annotations

import json
import statistics
from dataclasses import astuple
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.gpu_timing import Table, copy_rate, git_commit, microseconds, result
from benchmarks.kernels import marlin_experts
from benchmarks.kernels.bf16_experts import (
    EXPERTS,
    HIDDEN,
    SLOTS,
    WIDTH,
    Routed,
    best_bf16,
    grouped_mm_time,
    random_ids,
)
from bridge.fp4.nvfp4 import quantize_nvfp4
from bridge.layout import ModelShape, Part, RecordLayout, Site
from sglang_trace.kernels.combine import combine
from sglang_trace.kernels.fc1_quantize import quantize_tokens
from sglang_trace.kernels.fc2_quantize import quantize_expert_slots
from sglang_trace.kernels.grouped_gemm import DECODE, FEW, PREFILL, TileShape, multiply
from sglang_trace.kernels.kv.gather_rows import KVRows, PoolSite
from sglang_trace.kernels.moe import ExpertWeights, Workspace, run_experts, tile_shape
from sglang_trace.kernels.nvfp4 import quantize_nvfp4_packed
from sglang_trace.kernels.staging_columns import LayerColumns
from sglang_trace.kernels.tiles import sort_rows
from sglang_trace.quantization.reference import quantize_activation

LAYERS = 48
DEEPER = tuple(range(LAYERS // 2, LAYERS))
SHAPE = ModelShape(
    LAYERS, HIDDEN, WIDTH, EXPERTS, SLOTS, 4, 128, tuple(range(LAYERS)), tuple(range(LAYERS))
)
LAYOUT = RecordLayout(SHAPE, DEEPER, tuple(Site), 1)
L2_BYTES = 60 << 20
SETS = 8
PREFILL_TOKENS = 8192


def sets_for(nbytes: int) -> tuple[int, bool]:
    """How many input sets to rotate among, and whether they stay in the L2 cache all the same."""
    sets = max(2, min(SETS, 4 * L2_BYTES // nbytes + 1))
    return sets, sets * nbytes < L2_BYTES


# --- the quantizers and what lies around the GEMMs


def time_fc1(table: Table, tokens: int) -> None:
    site = LAYOUT.columns(Site.FC1, LAYERS - 1)
    nbytes = tokens * (4 * HIDDEN + site.stop - site.start + SLOTS)
    sets, cached = sets_for(nbytes)
    x = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(sets)]
    out = [torch.empty_like(each) for each in x]
    rows = torch.zeros(tokens, LAYOUT.row_bytes(Part.FORWARD), dtype=torch.uint8, device="cuda")
    ids = random_ids(tokens)
    places = [LayerColumns.of(LAYOUT, rows, layer) for layer in DEEPER[:sets]]

    def in_torch(index: int) -> None:
        fp4 = quantize_activation(x[index])
        out[index].copy_(fp4.dequantize(torch.bfloat16))
        LAYOUT.write_site(
            rows, Site.FC1, DEEPER[index], fp4.codes_u8, fp4.scales_u8, fp4.global_scale
        )
        LAYOUT.write_routes(rows, DEEPER[index], ids)

    us = microseconds(lambda i: quantize_tokens(x[i], ids, out[i], places[i]), sets)
    bare = microseconds(lambda i: quantize_tokens(x[i], ids, out[i], None), sets)
    reference = microseconds(in_torch, sets)
    table.add("fc1", tokens, nbytes, us, cached=cached, unrecorded_us=bare, torch_us=reference)


def time_fc2(table: Table, tokens: int) -> None:
    site = LAYOUT.columns(Site.FC2, LAYERS - 1)
    nbytes = tokens * (SLOTS * 6 * WIDTH + site.stop - site.start)
    sets, cached = sets_for(nbytes)
    both = [torch.randn(tokens * SLOTS, 2 * WIDTH, device="cuda").bfloat16() for _ in range(sets)]
    out = [torch.empty(tokens * SLOTS, WIDTH, device="cuda").bfloat16() for _ in range(sets)]
    rows = torch.zeros(tokens, LAYOUT.row_bytes(Part.FORWARD), dtype=torch.uint8, device="cuda")
    places = [LayerColumns.of(LAYOUT, rows, layer) for layer in DEEPER[:sets]]

    def in_torch(index: int) -> None:
        gate, up = both[index].chunk(2, dim=-1)
        h = (torch.nn.functional.silu(gate) * up).view(tokens, SLOTS, WIDTH)
        fp4 = quantize_activation(h)
        out[index].view(tokens, SLOTS, WIDTH).copy_(fp4.dequantize(torch.bfloat16))
        LAYOUT.write_site(
            rows, Site.FC2, DEEPER[index], fp4.codes_u8, fp4.scales_u8, fp4.global_scale
        )

    us = microseconds(lambda i: quantize_expert_slots(both[i], SLOTS, out[i], places[i]), sets)
    bare = microseconds(lambda i: quantize_expert_slots(both[i], SLOTS, out[i], None), sets)
    reference = microseconds(in_torch, sets)
    table.add("fc2", tokens, nbytes, us, cached=cached, unrecorded_us=bare, torch_us=reference)


def time_quantizers(table: Table) -> None:
    """One projection of one layer: what a weight update does 3 * 48 times."""
    w = torch.randn(EXPERTS, WIDTH, HIDDEN, device="cuda").bfloat16()
    packed = torch.empty(EXPERTS, WIDTH, HIDDEN // 2, dtype=torch.uint8, device="cuda")
    scales = torch.empty(EXPERTS, WIDTH, HIDDEN // 16, dtype=torch.uint8, device="cuda")
    one = torch.ones(EXPERTS, device="cuda")
    nbytes = w.nbytes + packed.nbytes + scales.nbytes
    us = microseconds(lambda _: quantize_nvfp4_packed(w, one, packed, scales), 2)
    reference = microseconds(lambda _: quantize_nvfp4(w, one.view(-1, 1, 1)), 2)
    table.add("nvfp4", EXPERTS * WIDTH, nbytes, us, torch_us=reference)


def time_kv(table: Table, tokens: int) -> None:
    """A finished request's K and V, 24 layers."""

    def buffer(width: int) -> Tensor:
        return torch.randint(0, 256, (1 << 16, 4, width), dtype=torch.uint8, device="cuda")

    pool = [
        PoolSite(site, layer, buffer(64), buffer(8))
        for site in (Site.K, Site.V)
        for layer in DEEPER
    ]
    gather = KVRows(LAYOUT, pool)
    slots = torch.randperm(1 << 16, device="cuda")[:tokens]
    due = torch.ones(tokens, dtype=torch.bool, device="cuda")
    nbytes = tokens * (len(pool) * 512 * 9 // 16 + LAYOUT.row_bytes(Part.KV))
    table.add("kv", tokens, nbytes, microseconds(lambda _: gather.gather(slots, slots, due), 1))


# --- the experts


def random_weights() -> ExpertWeights:
    """Random code words and mild scales: what they are does not matter to the time."""

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    def scales(*shape: int) -> Tensor:
        return torch.randint(0x28, 0x38, shape, dtype=torch.uint8, device="cuda")

    one = torch.full((EXPERTS,), 2.0**-6, device="cuda")
    return ExpertWeights(
        codes(EXPERTS, 2 * WIDTH, HIDDEN // 2),
        scales(EXPERTS, 2 * WIDTH, HIDDEN // 16),
        codes(EXPERTS, HIDDEN, WIDTH // 2),
        scales(EXPERTS, HIDDEN, WIDTH // 16),
        one,
        one,
        one,
    )


def gemm_time(weights: list[ExpertWeights], tokens: int, shape: TileShape, which: int) -> float:
    """Time of fc1's (0) or fc2's (1) GEMM."""
    routed = [Routed.make(tokens, shape.rows) for _ in weights]
    rows = tokens * SLOTS
    x = torch.randn(tokens if which == 0 else rows, (HIDDEN, WIDTH)[which], device="cuda")
    x = x.bfloat16()
    y = torch.empty(rows, (2 * WIDTH, HIDDEN)[which], dtype=torch.bfloat16, device="cuda")

    def call(index: int) -> None:
        w, tiles = weights[index], routed[index].tiles
        if which == 0:
            fc1 = (w.w13_codes, w.w13_scales, w.gate_scale, w.up_scale)
            multiply(x, *fc1, y, *tiles, SLOTS, shape)
        else:
            fc2 = (w.w2_codes, w.w2_scales, w.down_scale, w.down_scale)
            multiply(x, *fc2, y, *tiles, 1, shape)

    return microseconds(call, len(weights))


def weight_bytes(experts_used: float, bits: float) -> int:
    return int(experts_used * 3 * HIDDEN * WIDTH * bits / 8)


def marlin_layers(table: Table, weights: list[ExpertWeights]) -> list[marlin_experts.Layer]:
    """The same experts in Marlin's form; none if it does not run here or computes other results."""
    try:
        of_bound = marlin_experts.check()
    except Exception as error:
        # Whatever it is: no nvcc, another SGLang, kernels that are not built for this GPU.
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        table.note("experts, Marlin GEMMs alone", 0, failed=reason)
        return []
    print(f"Marlin's largest error is {of_bound:.3f} of the bound", flush=True)
    return [marlin_experts.Layer.repack(each) for each in weights]


def time_layer(
    table: Table,
    weights: list[ExpertWeights],
    bf16: list[tuple[Tensor, Tensor]],
    marlin: list[marlin_experts.Layer],
    tokens: int,
) -> None:
    """The whole layer with and without records, its GEMMs, and those of the baselines."""
    rows = tokens * SLOTS
    shape = tile_shape(rows, EXPERTS)
    routed = [Routed.make(tokens, shape.rows) for _ in weights]
    used = statistics.mean(each.experts_used for each in routed)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    router = torch.softmax(torch.randn(tokens, SLOTS, device="cuda"), -1)
    out = torch.empty_like(x)
    workspace = Workspace(tokens, SLOTS, HIDDEN, WIDTH, EXPERTS, "cuda")
    staging = torch.zeros(tokens, LAYOUT.row_bytes(Part.FORWARD), dtype=torch.uint8, device="cuda")
    place = LayerColumns.of(LAYOUT, staging, LAYERS - 1)

    def layer(index: int, recorded: LayerColumns | None) -> None:
        ids = routed[index].ids
        run_experts(x, router, ids, weights[index], workspace, recorded, out)

    sets = len(weights)
    whole = microseconds(lambda i: layer(i, place), sets)
    bare = microseconds(lambda i: layer(i, None), sets)
    y = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    tiny = {
        "sort_us": microseconds(
            lambda i: sort_rows(routed[i].ids.flatten(), EXPERTS, shape.rows, *routed[i].tiles[:3]),
            sets,
        ),
        "combine_us": microseconds(lambda i: combine(y, router, routed[i].ids, EXPERTS, out), sets),
    }
    moved = weight_bytes(used, 4.5)
    gemms = gemm_time(weights, tokens, shape, 0) + gemm_time(weights, tokens, shape, 1)
    tflops = 2 * rows * 3 * HIDDEN * WIDTH / gemms / 1e6
    table.add(
        "experts", tokens, moved, whole, unrecorded_us=bare, gemms_us=gemms, tflops=tflops, **tiny
    )
    theirs = weight_bytes(used, 16)
    best, how = best_bf16(bf16, tokens)
    table.add("experts, BF16 GEMMs alone", tokens, theirs, best, tile=how, fp4_speedup=best / gemms)
    ours = grouped_mm_time(bf16, tokens)
    table.add("experts, torch grouped_mm alone", tokens, theirs, ours, fp4_speedup=ours / gemms)
    if marlin:
        us = marlin_experts.gemm_times(marlin, tokens)
        table.add("experts, Marlin GEMMs alone", tokens, moved, us, fp4_speedup=us / gemms)


# --- finding the tiles


def candidates(tokens: int) -> list[TileShape]:
    """Tiles worth a try: other amounts loaded ahead, converted at once and run side by side."""
    if tokens >= PREFILL_TOKENS:
        return [
            PREFILL,
            # Two tiles a processor: one converts while the other multiplies.
            *(TileShape(128, 128, 32, 8, 2, registers=128), TileShape(128, 128, 16, 8, 3)),
            *(TileShape(128, 128, 16, 4, 3), TileShape(128, 128, 32, 4, 2)),
            # Wide ones: activations are read less often.
            *(TileShape(128, 256, 16, 8, stages) for stages in (3, 4)),
            *(TileShape(64, 256, 16, 4, 3), TileShape(64, 128, 32, 4, 3)),
        ]
    return [
        *(DECODE, FEW, TileShape(16, 64, 32, 4, 4), TileShape(16, 64, 64, 4, 3)),
        *(TileShape(16, 64, 64, 4, 4), TileShape(16, 64, 128, 4, 3)),
        *(TileShape(16, 128, 32, 4, stages) for stages in (3, 4)),
        *(TileShape(16, 128, 64, 4, 3), TileShape(16, 128, 32, 8, 4)),
    ]


def tune(weights: list[ExpertWeights], batches: tuple[int, ...]) -> None:
    """Print the time of many tiles; those in `grouped_gemm` were chosen from this."""
    for tokens in batches:
        used = weights if tokens < PREFILL_TOKENS else weights[:2]
        times = []
        for shape in candidates(tokens):
            try:
                times.append((*(gemm_time(used, tokens, shape, i) for i in (0, 1)), shape))
            except Exception as error:
                print("tune", shape, type(error).__name__, str(error)[:80], flush=True)
        ranked = sorted(times, key=lambda t: t[0] + t[1])
        for first, second, shape in ranked:
            print(f"tune {tokens}: {first:7.1f} + {second:7.1f} us  {shape}", flush=True)
        for which, name in ((0, "fc1"), (1, "fc2")):
            best = min(times, key=lambda t: t[which])
            print(f"tune {tokens}: best {name} {best[which]:.1f} us  {best[2]}", flush=True)


PARTS = ("quantizers", "kv", "experts")


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/h200/fp4_kernels.json"
    ),
    parts: Annotated[str, typer.Option(help=f"What to measure, of {', '.join(PARTS)}.")] = ",".join(
        PARTS
    ),
    batches: Annotated[
        str, typer.Option(help="Tokens of a pass.")
    ] = f"1,8,32,128,{PREFILL_TOKENS}",
    tune_tiles: Annotated[bool, typer.Option("--tune", help="Try GEMM tiles instead.")] = False,
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Times the kernels at the given batches; writes JSON."""
    wanted, tokens = parts.split(","), tuple(int(each) for each in batches.split(","))
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"no such parts: {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    weights = [random_weights() for _ in range(SETS)]
    if tune_tiles:
        tune(weights, tokens)
        return
    table = Table(copy_rate())
    print(f"copy: {table.rate:.0f} GB/s")
    try:
        measure(table, weights, wanted, tokens)
    finally:
        tiles = {"few": astuple(FEW), "decode": astuple(DECODE), "prefill": astuple(PREFILL)}
        report = result("fp4_kernels", table, commit or git_commit(), tiles=tiles)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


def measure(
    table: Table, weights: list[ExpertWeights], parts: list[str], batches: tuple[int, ...]
) -> None:
    """Fill the table."""
    if "quantizers" in parts:
        for tokens, time_site in product(batches, (time_fc1, time_fc2)):
            time_site(table, tokens)
        time_quantizers(table)
    if "kv" in parts:
        for tokens in (128, 4096):
            time_kv(table, tokens)
    if "experts" not in parts:
        return
    marlin = marlin_layers(table, weights)
    bf16 = [
        (
            torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16),
            torch.randn(EXPERTS, HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16),
        )
        for _ in weights
    ]
    for tokens in batches:
        few = SETS if tokens < PREFILL_TOKENS else 2
        time_layer(table, weights[:few], bf16[:few], marlin[:few], tokens)


if __name__ == "__main__":
    typer.run(main)
