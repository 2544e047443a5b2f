"""How the decode benchmark lays requests into the pool, merges its rows, and what it plots."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engine import decode_128k, plot_decode_128k, step_parts
from benchmarks.engine.decode_128k import (
    CONFIGURATIONS,
    merged,
    reason,
    run,
    server_flags,
    with_limit,
)
from benchmarks.engine.decode_engine import (
    fill,
    interleaved,
    most_requests,
    pool_tensors,
    unique_bytes,
)
from sglang_trace.preflight.unsupported import GPU_RELEASE


def row(configuration: str, context: int = 131072, **more: Any) -> dict[str, Any]:
    return {"configuration": configuration, "context": context, "page_size": 1, **more}


def measured(configuration: str, batch: int, ms: float, context: int = 131072) -> dict[str, Any]:
    rate = round(1000 * batch / ms, 2)
    return row(configuration, context, batch=batch, ms_per_step=ms, tokens_per_s=rate)


# --- the pool


@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_lie_page_by_page_between_each_other(page_size: int) -> None:
    batch, tokens = 3, 8
    slots = torch.arange(100, 100 + batch * tokens)
    found = interleaved(slots, batch, page_size)
    assert found.shape == (batch, tokens)
    assert sorted(found.flatten().tolist()) == slots.tolist()
    for request in range(batch):
        for position in range(tokens):
            page = position // page_size * batch + request
            assert found[request, position] == 100 + page * page_size + position % page_size


@pytest.mark.parametrize("page_size", [1, 16])
def test_as_many_requests_as_fit_and_not_one_more(page_size: int) -> None:
    pool, context, steps = 744_521, 131_072, 33
    size = most_requests(pool, context, steps, page_size)
    pages = -(-(context + steps) // page_size)
    assert size == 5
    assert size * pages * page_size <= pool < (size + 1) * pages * page_size
    assert most_requests(context, context, steps, page_size) == 0


class Pool:
    def __init__(self, dtype: torch.dtype, stored: torch.dtype, scales: bool) -> None:
        self.dtype = dtype
        self.k_buffer, self.v_buffer = (
            [torch.zeros(500, 2, 8, dtype=stored) for _ in range(2)] for _ in range(2)
        )
        if scales:
            self.k_scale_buffer, self.v_scale_buffer = (
                [torch.zeros(500, 2, 1, dtype=torch.uint8) for _ in range(2)] for _ in range(2)
            )


@pytest.mark.parametrize(
    "pool",
    [
        Pool(torch.bfloat16, torch.bfloat16, False),
        Pool(torch.float8_e4m3fn, torch.uint8, False),
        Pool(torch.float4_e2m1fn_x2, torch.uint8, True),
    ],
    ids=["bf16", "fp8", "nvfp4"],
)
def test_a_filled_pool_is_finite_and_nowhere_empty(pool: Pool) -> None:
    fill(pool)
    tensors = list(pool_tensors(pool))
    assert len(tensors) == (8 if hasattr(pool, "k_scale_buffer") else 4)
    for name, tensor in tensors:
        read_as_e4m3 = "scale" in name or pool.dtype == torch.float8_e4m3fn
        values = tensor.view(torch.float8_e4m3fn) if read_as_e4m3 else tensor
        assert values.float().isfinite().all()
        assert (values.float() != 0).flatten(1).any(1).float().mean() > 0.99


def test_memory_that_tensors_share_is_counted_once() -> None:
    base = torch.zeros(100)
    assert unique_bytes(iter([base, base[10:], torch.zeros(5)])) == 400 + 20


# --- the rows


def test_a_new_row_replaces_the_one_of_the_same_configuration_context_and_page_size() -> None:
    rows = merged([], row("fp4", failed="it crashed"))
    rows = merged(rows, measured("fp4", 31, 29.0))
    rows = merged(rows, measured("fp4", 60, 29.0, context=65536))
    rows = merged(rows, measured("bf16", 5, 22.8))
    assert [(each["configuration"], each["context"]) for each in rows] == [
        ("bf16", 131072),
        ("fp4", 65536),
        ("fp4", 131072),
    ]
    assert all("failed" not in each for each in rows)


def test_ratios_are_to_the_best_bf16_configuration_at_that_context() -> None:
    rows: list[dict[str, Any]] = []
    for each in (
        measured("fp4", 30, 30.0),
        measured("bf16", 5, 25.0),
        measured("bf16-triton", 5, 50.0),
        measured("fp4", 30, 30.0, context=8192),
        row("fp8-kv", failed="no kernel"),
    ):
        rows = merged(rows, each)
    ratios = {(each["configuration"], each["context"]): each.get("ratio_to_bf16") for each in rows}
    assert ratios == {
        ("bf16", 131072): 1.0,
        ("bf16-triton", 131072): 0.5,
        ("fp4", 131072): 5.0,
        ("fp4", 8192): None,
        ("fp8-kv", 131072): None,
    }


def test_capture_costs_the_difference_at_the_same_batch_only() -> None:
    rows = merged([measured("fp4", 30, 30.0)], measured("fp4+capture", 30, 30.3))
    assert rows[1]["capture_ms"] == pytest.approx(0.3)
    assert rows[1]["capture_ratio"] == pytest.approx(30.0 / 30.3, abs=1e-4)
    rows = merged(rows, measured("fp4", 31, 30.0))
    assert "capture_ms" not in rows[1]


def test_the_limit_is_what_the_batch_reads_at_the_rate_of_a_copy() -> None:
    kv = {"copy_gb_per_s": 4000, "kv_bytes_per_token": 27_648}
    found = with_limit(measured("fp4", 30, 30.0) | kv)
    assert found["kv_limit_ms"] == pytest.approx(30 * 131072 * 27_648 / 4e12 * 1e3, abs=1e-3)
    assert "kv_limit_ms" not in with_limit(row("fp4", failed="why") | kv)


def test_flags_name_the_backend_on_a_gpu_only() -> None:
    on_gpu = server_flags(CONFIGURATIONS["fp4"], True, False, 0.9, 16)
    assert on_gpu[on_gpu.index("--attention-backend") + 1] == "trace_fp4"
    assert on_gpu[on_gpu.index("--page-size") + 1] == "16"
    assert "--max-total-tokens" not in on_gpu
    assert "--attention-backend" not in server_flags(CONFIGURATIONS["fp4"], False, True, 0.9, 1)


def test_a_process_that_fails_leaves_its_rows_and_its_reason(tmp_path: Path) -> None:
    script = "print('row {\"context\": 1}'); print('text'); raise MemoryError('no room left')"
    rows = run([sys.executable, "-c", script], {}, tmp_path / "log")
    assert next(rows) == {"context": 1}
    with pytest.raises(RuntimeError, match="exit code 1: MemoryError: no room left"):
        next(rows)
    assert "text" in (tmp_path / "log").read_text()


def test_the_reason_is_the_last_error_of_a_log() -> None:
    assert reason("Loading\nValueError: first\nNotCaptured: second\nbye\n") == "NotCaptured: second"
    assert reason("") == "it printed nothing"


@pytest.mark.server
@pytest.mark.skipif(version("sglang") != GPU_RELEASE, reason=f"drives sglang {GPU_RELEASE}")
def test_a_tiny_engine_decodes_from_a_filled_pool_and_every_row_is_held(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    decode_128k.main(
        out=out, configs="bf16,fp4+capture", contexts="64", steps=3, tiny=True, memory=0.5,
        page_size=1, sites="fc1,k,v,routes", layers=0, logs=None, commit="test",
    )  # fmt: skip
    rows = {each["configuration"]: each for each in decode_128k.read_rows(out)}
    assert rows["bf16"]["ratio_to_bf16"] == 1.0
    assert rows["fp4+capture"]["run_rows_held"] == rows["fp4+capture"]["run_rows_sent"] > 0


# --- the parts of a step


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("void flashinfer::BatchPrefillWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8u>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("_fwd_kernel_stage2", "attention"),
        ("attend_tiles(Arguments)", "attention"),
        ("merge(Arguments)", "attention"),
        ("create_flashinfer_kv_indices_triton", "attention"),
        ("_store_kv", "attention"),
        ("fused_moe_kernel", "experts"),
        ("moe_align_block_size_kernel", "experts"),
        ("topk_softmax", "experts"),
        ("_multiply", "experts"),
        ("_quantize_slots", "experts"),
        ("_quantize_tokens", "experts"),
        ("_sort_rows", "experts"),
        ("_combine", "experts"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("nvjet_tst_128x64_64x8_4x1_v_bz_TNT", "rest"),
        ("RMSNormKernel", "rest"),
        ("elementwise_kernel", "rest"),
    ],
)
def test_kernels_belong_to_the_part_they_compute(kernel: str, part: str) -> None:
    assert step_parts.part_of(kernel) == part


def test_the_parts_of_a_step_add_up() -> None:
    kernels = {
        "attend_tiles(Arguments)": 6000.0,
        "_multiply": 3000.0,
        "nvjet": 900.0,
        "norm": 100.0,
    }
    parts = step_parts.split(kernels, steps=2)
    assert parts == {"copies": 0.0, "attention": 3.0, "experts": 1.5, "rest": 0.5}
    assert step_parts.largest(kernels, 2)[0] == ["attention", "attend_tiles(Arguments)", 3.0]


# --- the plot


def test_the_plot_shows_what_was_measured_and_leaves_out_what_failed(tmp_path: Path) -> None:
    parts = {"attention": 15.0, "experts": 8.0, "rest": 5.0, "copies": 0.1, "idle": 1.0}
    rows = [
        *(measured("bf16", 80 // n, 20.0, 8192 * n) | {"split_ms": parts} for n in (1, 4, 16)),
        *(measured("fp4", 480 // n, 29.0, 8192 * n) | {"split_ms": parts} for n in (1, 4, 16)),
        row("fp8-kv", failed="no kernel"),
    ]
    report = {"device": "a GPU", "rows": rows}
    assert list(plot_decode_128k.measured(report)) == ["bf16", "fp4"]
    other = {"page_size": 64, "batch": 1, "tokens_per_s": 1.0}
    with_other = {"rows": [*rows, row("fp4") | other]}
    assert plot_decode_128k.measured(with_other) == plot_decode_128k.measured(report)
    out = tmp_path / "plot.png"
    plot_decode_128k.draw(report, out)
    assert 5_000 < out.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"run benchmarks\.engine\.decode_128k first"):
        plot_decode_128k.draw({"device": "a GPU", "rows": [rows[-1]]}, out)
