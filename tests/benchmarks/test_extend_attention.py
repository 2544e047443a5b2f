"""The cases, inputs and kernels of the prefill benchmark, which times on a GPU only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_timing import Table
from benchmarks.kernels import extend_attention as benchmark
from benchmarks.kernels.extend_attention import CASES, FLASH, KERNELS, Case, Inputs, measure
from sglang_trace.attention import extend_flash
from sglang_trace.attention.extend_pieces import pieces_of
from sglang_trace.attention.reference import keys_and_values
from tests.sglang_trace.attention.stand_in import attention_of_torch
from tests.sglang_trace.kernels.inputs import DEVICE

SMALL = Case("small", 2, new=9, prefix=20, q_heads=4, kv_heads=2, head_dim=64)
FRESH = Case("fresh", 2, new=9, q_heads=4, kv_heads=2, head_dim=64)


@pytest.fixture(autouse=True)
def flash_attention_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(extend_flash, "flash_attention", attention_of_torch)


def test_what_a_mask_lets_through_is_counted_once() -> None:
    case = Case("", 3, new=4, prefix=10, q_heads=2, kv_heads=1, head_dim=64)
    seen = sum(10 + token + 1 for token in range(4))
    assert case.flop() == 3 * 2 * seen * 2 * (2 * 64)
    assert case.dequantized_bytes() == 3 * 14 * (2 * (32 + 4 + 128) + 4)


def test_cases_have_different_names_and_each_is_one_piece() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        new, keys = [case.new] * case.batch, [case.keys] * case.batch
        sizes = {"heads": case.kv_heads, "size": case.head_dim, "device": "cpu"}
        assert len(pieces_of(new, keys, **sizes)) == 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", [SMALL, FRESH], ids=lambda case: case.name)
def test_every_kernel_computes_the_same_attention(kernel: str, case: Case) -> None:
    inputs = Inputs(case, DEVICE)
    if case.prefix and kernel == "torch SDPA BF16":
        with pytest.raises(ValueError, match="no prefix"):
            KERNELS[kernel](inputs)
        return
    out = KERNELS[kernel](inputs)()
    assert inputs.error(out)["max_error"] < 0.05
    wrong = out.reshape(inputs.q_THD.shape).roll(1, dims=0)
    assert inputs.error(wrong)["max_error"] > 0.2, "the error sees another token's output"


def test_a_row_has_its_time_beside_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(call: Callable[[], Tensor]) -> float:
        return 300.0

    monkeypatch.setattr(benchmark, "eager_microseconds", timed)
    table, inputs = Table(4000.0), Inputs(FRESH, DEVICE)
    assert measure(table, inputs, FLASH, None) == 300.0
    assert measure(table, inputs, "ours", 200.0) == 300.0
    flash, ours = table.rows
    assert "times_torch_flash" not in flash
    assert ours["times_torch_flash"] == 1.5
    assert (ours["kernel"], ours["case"], ours["batch"], ours["us"]) == ("ours", "fresh", 2, 300.0)


def test_a_kernel_that_fails_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(4000.0)
    assert measure(table, Inputs(SMALL, DEVICE), "torch SDPA BF16", 200.0) is None
    (row,) = table.rows
    assert row["failed"].startswith("ValueError: its causal mask begins at the first key")
    assert "torch SDPA" in capsys.readouterr().out


def after_a_call(call: Callable[[], object]) -> float:
    call()
    return 100.0


def test_a_run_writes_every_kernel_of_every_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "CASES", (SMALL, FRESH))
    monkeypatch.setattr(benchmark, "DEVICE", DEVICE)
    monkeypatch.setattr(benchmark, "copy_rate", lambda: 4000.0)
    monkeypatch.setattr(benchmark, "eager_microseconds", after_a_call)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some device")
    out = tmp_path / "deep" / "result.json"
    benchmark.main(out=out, kernels="", cases="", commit="abc")
    report = json.loads(out.read_text())
    assert {"name", "date", "commit", "command", "device", "versions", "rows"} <= set(report)
    assert (report["name"], report["commit"]) == ("extend_attention", "abc")
    told = [(row["case"], row["kernel"], "failed" in row) for row in report["rows"]]
    kernels = [*KERNELS, "dequantize"]
    assert told == [
        *(("small", kernel, kernel == "torch SDPA BF16") for kernel in kernels),
        *(("fresh", kernel, False) for kernel in kernels),
    ]
    benchmark.main(out=out, kernels="ours", cases="fresh", commit="abc")
    rows = json.loads(out.read_text())["rows"]
    assert [row["kernel"] for row in rows] == ["ours", "dequantize"]


def test_dequantized_keys_lie_in_the_order_of_positions() -> None:
    inputs = Inputs(SMALL, DEVICE)
    keys, values = inputs.bf16()
    for request in range(SMALL.batch):
        mine = slice(request * SMALL.keys, (request + 1) * SMALL.keys)
        for found, wanted in zip((keys, values), keys_and_values(inputs.kv, request), strict=True):
            assert torch.equal(found[mine].float(), wanted)
