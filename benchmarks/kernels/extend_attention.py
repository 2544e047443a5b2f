"""Prefill attention of one layer: ours on NVFP4 keys and values beside torch's on BF16 ones.

`torch flash BF16` is the same operator as ours uses, with the same pieces, on keys and values that
lie in BF16 in the order of positions: what is left to gain. `torch SDPA BF16` is the kernel that
torch itself prefers, where its causal mask fits (no prefix). `Triton loop` is the kernel that
computed prefill before; it dequantizes in registers. `dequantize` is the part of ours that BF16
does without. Slots are shuffled, a page is one token.

Launched without graphs, as SGLang launches prefill, and timed with CUDA events. `tflop_per_s`
counts the two products where the mask lets them be seen. The error is against attention in FP32 on
the dequantized values, on the last tokens of the first request, over the root-mean-square of the
expected output. A kernel that fails is a row with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_timing import Table, copy_rate, eager_microseconds, git_commit, result
from benchmarks.kernels.attention_case import K_SCALE, SCALE_CODES, V_SCALE, dequantized, errors
from benchmarks.kernels.decode_attention import chosen, why
from bridge.fp4.nvfp4 import NVFP4_BLOCK
from sglang_trace.attention import extend_flash
from sglang_trace.attention.extend import extend_attention
from sglang_trace.attention.extend_pieces import pieces_of
from sglang_trace.attention.paged_kv import PagedKV
from sglang_trace.attention.reference import attend
from sglang_trace.kernels.kv.dequantize import dequantize_keys_and_values

Call = Callable[[], Tensor]
CHECKED_TOKENS = 8
DEVICE = "cuda"


@dataclass(frozen=True)
class Case:
    """`batch` requests of `new` tokens, each after `prefix` that are stored."""

    name: str
    batch: int
    new: int
    prefix: int = 0
    q_heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128

    @property
    def keys(self) -> int:
        """Keys of a request."""
        return self.prefix + self.new

    def flop(self) -> int:
        """Multiplications and additions of the products that the mask lets through."""
        seen = self.new * self.prefix + self.new * (self.new + 1) // 2
        return 2 * 2 * self.batch * seen * self.q_heads * self.head_dim

    def dequantized_bytes(self) -> int:
        """What dequantization moves: code words and block scales in, BF16 out, slots."""
        values = 2 * self.batch * self.keys * self.kv_heads * self.head_dim
        return values // 2 + values // NVFP4_BLOCK + 2 * values + 4 * self.batch * self.keys


CASES = (
    Case("8192 new", 1, 8192),
    Case("8 x 1024 new", 8, 1024),
    Case("128 new after 131072", 1, 128, 131_072),
    Case("8192 new after 65536", 1, 8192, 65_536),
)


class Inputs:
    """A pool in FP4, the requests' slots in it, their queries, and where an output goes."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case = case
        slots = 1 + case.batch * case.keys

        def random(width: int, low: int, high: int) -> Tensor:
            shape = slots, case.kv_heads, case.head_dim // width
            return torch.empty(shape, dtype=torch.uint8, device=device).random_(low, high)

        order = torch.randperm(slots - 1, device=device, dtype=torch.int32) + 1
        self.kv = PagedKV(
            random(2, 0, 256),
            random(NVFP4_BLOCK, *SCALE_CODES),
            random(2, 0, 256),
            random(NVFP4_BLOCK, *SCALE_CODES),
            order.view(case.batch, case.keys),
            torch.arange(case.batch, device=device),
            torch.full((case.batch,), case.keys, dtype=torch.int32, device=device),
            1,
            K_SCALE,
            V_SCALE,
        )
        shape = case.batch * case.new, case.q_heads, case.head_dim
        self.q_THD = torch.randn(shape, device=device).bfloat16()
        self.out_THD = torch.empty_like(self.q_THD)
        self.pieces = pieces_of(
            [case.new] * case.batch,
            [case.keys] * case.batch,
            heads=case.kv_heads,
            size=case.head_dim,
            device=device,
        )

    @property
    def sm_scale(self) -> float:
        return self.case.head_dim**-0.5

    def stored(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kv = self.kv
        return kv.k_codes_PHd, kv.k_scales_PHb, kv.v_codes_PHd, kv.v_scales_PHb

    def bf16(self) -> tuple[Tensor, Tensor]:
        """Keys and values [N, H, D] that the FP4 pool holds, in the order of positions."""
        slots = self.kv.table_RE.flatten().long()
        k_codes, k_scales, v_codes, v_scales = (each[slots] for each in self.stored())
        return (
            dequantized(k_codes, k_scales, K_SCALE),
            dequantized(v_codes, v_scales, V_SCALE),
        )

    def error(self, out: Tensor) -> dict[str, float]:
        """Of the first request's last tokens; the output may have a dimension for requests."""
        last = slice(max(0, self.case.new - CHECKED_TOKENS), self.case.new)
        q_THD = self.q_THD[last]
        expected = attend(q_THD, self._first(), [len(q_THD)], self.sm_scale)
        return errors(out.reshape(self.q_THD.shape)[last], expected)

    def _first(self) -> PagedKV:
        kv = self.kv
        rows, lengths = kv.rows_B[:1], kv.lengths_B[:1]
        return PagedKV(*self.stored(), kv.table_RE, rows, lengths, 1, K_SCALE, V_SCALE)


def prepare_ours(inputs: Inputs) -> Call:
    return lambda: extend_flash.extend_flash(
        inputs.q_THD,
        inputs.kv,
        inputs.pieces,
        sm_scale=inputs.sm_scale,
        out_THD=inputs.out_THD,
    )


def prepare_triton(inputs: Inputs) -> Call:
    case, kv = inputs.case, inputs.kv
    new_B = torch.full_like(kv.lengths_B, case.new)
    starts_B = new_B.cumsum(0) - new_B
    return lambda: extend_attention(
        inputs.q_THD,
        kv,
        starts_B=starts_B,
        new_B=new_B,
        max_new=case.new,
        sm_scale=inputs.sm_scale,
        out_THD=inputs.out_THD,
    )


def prepare_flash(inputs: Inputs) -> Call:
    keys, values = inputs.bf16()
    (piece,) = inputs.pieces
    return lambda: extend_flash.flash_attention(inputs.q_THD, keys, values, piece, inputs.sm_scale)


def prepare_sdpa(inputs: Inputs) -> Call:
    case = inputs.case
    if case.prefix:
        raise ValueError("its causal mask begins at the first key, so there must be no prefix")
    q, k, v = (
        each.unflatten(0, (case.batch, case.new)).transpose(1, 2)
        for each in (inputs.q_THD, *inputs.bf16())
    )

    def call() -> Tensor:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return call


FLASH = "torch flash BF16"
KERNELS: dict[str, Callable[[Inputs], Call]] = {
    FLASH: prepare_flash,
    "ours": prepare_ours,
    "Triton loop": prepare_triton,
    "torch SDPA BF16": prepare_sdpa,
}


def measure(table: Table, inputs: Inputs, kernel: str, flash_us: float | None) -> float | None:
    """Add a kernel's row and return its time; `flash_us` is that of torch's flash attention."""
    case = inputs.case
    try:
        call = KERNELS[kernel](inputs)
        error = inputs.error(call())
        us = eager_microseconds(call)
    except Exception as failure:
        table.note(kernel, case.batch, failed=why(failure), **described(case))
        return None
    more: dict[str, Any] = {"us": round(us, 1), "tflop_per_s": round(case.flop() / us / 1e6, 1)}
    if flash_us is not None:
        more["times_torch_flash"] = round(us / flash_us, 3)
    table.note(kernel, case.batch, **more, **error, **described(case))
    return us


def measure_dequantize(table: Table, inputs: Inputs) -> None:
    """Add the row of the part that BF16 does without."""
    case = inputs.case
    (piece,) = inputs.pieces
    shape = 2, piece.keys, case.kv_heads, case.head_dim
    scratch_2NHD = inputs.q_THD.new_empty(shape)

    def call() -> None:
        dequantize_keys_and_values(
            *inputs.stored(),
            table_RE=inputs.kv.table_RE,
            rows_B=inputs.kv.rows_B,
            starts_S=piece.k_starts_S,
            max_keys=piece.max_keys,
            heads=piece.heads,
            page_size=1,
            k_NhD=scratch_2NHD[0],
            v_NhD=scratch_2NHD[1],
        )

    us = eager_microseconds(call)
    table.add("dequantize", case.batch, case.dequantized_bytes(), us, **described(case))


def described(case: Case) -> dict[str, Any]:
    """The shape but for the batch, for the JSON."""
    fields = asdict(case)
    del fields["batch"]
    return {"case": fields.pop("name"), **fields}


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/h200/extend_attention.json"
    ),
    kernels: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    cases: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Times every kernel on every case; writes JSON after every case."""
    wanted: list[str] = chosen(kernels, {name: name for name in KERNELS})
    shapes: list[Case] = chosen(cases, {case.name: case for case in CASES})
    commit = commit or git_commit()
    out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(copy_rate())
    for case in shapes:
        inputs = Inputs(case, DEVICE)
        flash_us = None
        for kernel in wanted:
            us = measure(table, inputs, kernel, flash_us)
            flash_us = us if kernel == FLASH else flash_us
        measure_dequantize(table, inputs)
        out.write_text(json.dumps(result("extend_attention", table, commit), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
