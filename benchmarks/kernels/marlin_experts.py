"""SGLang's Marlin on the same NVFP4 experts: what our grouped GEMM is measured against.

Marlin is a W4A16 GEMM, so it computes W4A4 when its input is already quantized and exact in BF16.
Global scales are left out on both sides of it: weights are code word * block scale, activations
too, and the powers of two (token, gate, up, down) multiply the result, which is exact. In an engine
silu, the quantizer of fc2 and the last sum would do that; here it is not part of the time.

Marlin does not read the experts as they are stored. Code words lie in the order of its tiles, and
block scales are permuted and rewritten from E4M3 to an unsigned format of five exponent bits. So
every weight update would repack each expert into the tensors that CUDA graphs know, and digests
would have to be taken from the packed form or from a second copy. SGLang itself puts new tensors in
the place of the old ones, which graphs do not see. It also takes one global scale an expert for
gate and up together, and keeps it in BF16.

Partial sums are added in FP32 here. `fused_marlin_moe` adds them with BF16 atomics on Hopper, which
rounds more than once and depends on the order in which blocks end.

Shape legend: E experts, O, I outputs and inputs of a matrix, R rows (token, slot), B blocks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_timing import microseconds
from benchmarks.kernels.bf16_experts import EXPERTS, HIDDEN, SLOTS, WIDTH, Routed
from bridge.fp4.nvfp4 import NVFP4_BLOCK, Fp4Tensor, unpack_nibbles
from sglang_trace.kernels.moe import ExpertWeights
from sglang_trace.kernels.nvfp4 import quantize_weights
from sglang_trace.preflight.unsupported import GPU_RELEASE
from sglang_trace.quantization.reference import quantize_activation

# The rows of a block of Marlin's and the share of them that SGLang wants filled. SGLang also has
# blocks of 48, which none of the batches here would get.
BLOCKS, FILLED = (8, 16, 32, 64), 0.9
FP32_ULP, BF16_HALF = 2.0**-23, 2.0**-8


class AnotherRelease(Exception):
    """SGLang's kernel may take other arguments."""


class BeyondBound(Exception):
    """Results further from the exact ones than the order of FP32 sums explains."""


@dataclass(frozen=True)
class Matrices:
    """One projection of all experts in Marlin's form, with global scales of one."""

    codes: Tensor
    scales: Tensor
    ones: Tensor
    outputs: int
    inputs: int

    @classmethod
    def repack(cls, codes_EOI: Tensor, scales_EOB: Tensor) -> Matrices:
        """Repack code words uint8 [E, O, I/2] and scales uint8 [E, O, I/16]."""
        from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack
        from sglang.srt.layers.quantization.marlin_utils import marlin_permute_scales
        from sglang.srt.layers.quantization.marlin_utils_fp4 import (
            nvfp4_marlin_process_global_scale,
            nvfp4_marlin_process_scales,
        )

        experts, outputs, packed = codes_EOI.shape
        inputs = 2 * packed
        no_order = torch.empty(0, dtype=torch.int32, device=codes_EOI.device)
        codes, scales = [], []
        for expert in range(experts):
            words = codes_EOI[expert].view(torch.int32).T.contiguous()
            codes.append(gptq_marlin_repack(words, no_order, inputs, outputs, 4))
            rows = scales_EOB[expert].view(torch.float8_e4m3fn).to(torch.bfloat16).T.contiguous()
            rows = marlin_permute_scales(rows, inputs, outputs, 16)
            scales.append(nvfp4_marlin_process_scales(rows))
        ones = torch.ones(experts, dtype=torch.bfloat16, device=codes_EOI.device)
        ones = nvfp4_marlin_process_global_scale(ones)
        return cls(torch.stack(codes), torch.stack(scales), ones, outputs, inputs)


@dataclass(frozen=True)
class Layer:
    """Both projections, and what every call needs."""

    w13: Matrices
    w2: Matrices
    locks: Tensor

    @classmethod
    def repack(cls, weights: ExpertWeights) -> Layer:
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        return cls(
            Matrices.repack(weights.w13_codes, weights.w13_scales),
            Matrices.repack(weights.w2_codes, weights.w2_scales),
            torch.zeros(4 * processors, dtype=torch.int32, device="cuda"),
        )


@dataclass(frozen=True)
class Sorted:
    """Routes in the form that Marlin takes: row numbers by expert, R where a block is not full."""

    rows: Tensor
    experts: Tensor
    padded: Tensor
    block: int

    @classmethod
    def of(cls, routed: Routed, block: int) -> Sorted:
        total = routed.ids.numel()
        rows = torch.where(routed.row_of < 0, total, routed.row_of).flatten().contiguous()
        return cls(rows, routed.expert_of, routed.count * block, block)


def block_of(rows: int, experts: int) -> int:
    """Choose the block as SGLang does."""
    return next((size for size in BLOCKS if rows / experts / size < FILLED), BLOCKS[-1])


@cache
def gemm() -> Callable[..., Tensor]:
    """Return SGLang's `moe_wna16_marlin_gemm`, compiled for NVFP4 alone.

    SGLang compiles some 190 kernels for all formats, which takes many minutes, when it needs the
    first of them. The table of formats in its source is cut down to ours in a copy: half a minute.

    Raises:
        AnotherRelease: the installed SGLang is not the one whose call is known here.
    """
    if version("sglang") != GPU_RELEASE:
        raise AnotherRelease(f"sglang {version('sglang')}, not {GPU_RELEASE}")
    import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
    from sglang.kernels.jit.utils import KERNEL_PATH, load_jit, make_cpp_args
    from sglang.kernels.ops.moe import moe_wna16_marlin

    folder = KERNEL_PATH / "csrc" / "gemm" / "marlin_moe"
    source = (folder / "moe_wna16_marlin.cuh").read_text()
    others = r"^\s*(?:COMMON|BIGGROUP|ACT|MXFP4|FZP)_GET_IF\(host::.*\n"
    copy = Path(tempfile.mkdtemp()) / "nvfp4_marlin.cuh"
    copy.write_text(re.sub(others, "", source, flags=re.MULTILINE))
    arguments = make_cpp_args(torch.bfloat16, False, False)
    module = load_jit(
        "trace_nvfp4_marlin",
        # An absolute path stays what it is under SGLang's folder of sources.
        cuda_files=[str(copy)],
        cuda_wrappers=[("moe_wna16_marlin_gemm", f"moe_wna16_marlin_gemm<{arguments}>")],
        extra_include_paths=[str(folder)],
    )
    moe_wna16_marlin._jit_moe_wna16_marlin_module = lambda *_: module
    return moe_wna16_marlin.moe_wna16_marlin_gemm


def multiply(
    x: Tensor, w: Matrices, locks: Tensor, rows: Sorted, router: Tensor, slots: int, y: Tensor
) -> None:
    """Fill y [R, O] from x [R / slots, I]; the router's weights are not used."""
    from sgl_kernel.scalar_type import scalar_types

    gemm()(
        x,
        y,
        w.codes,
        None,
        w.scales,
        w.ones,
        None,
        None,
        None,
        locks,
        rows.rows,
        rows.experts,
        rows.padded,
        router,
        moe_block_size=rows.block,
        top_k=slots,
        mul_topk_weights=False,
        is_ep=False,
        b_q_type=scalar_types.float4_e2m1f,
        size_m=len(x),
        size_n=w.outputs,
        size_k=w.inputs,
        is_k_full=True,
        use_atomic_add=False,
        use_fp32_reduce=True,
    )


# --- correct before fast


def spread_weights(experts: int, hidden: int, width: int) -> ExpertWeights:
    """Quantized matrices of many magnitudes, with blocks whose scales are subnormal or zero."""

    def quantized(out: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
        w = torch.randn(experts, out, into, device="cuda")
        w = w * 2.0 ** torch.randint(-6, 4, (experts, 1, 1), device="cuda")
        w[:, ::5, :16] *= 2.0**-15
        w[:, ::7, 16:32] = 0.0
        codes = torch.empty(experts, out, into // 2, dtype=torch.uint8, device="cuda")
        scales = torch.empty(experts, out, into // 16, dtype=torch.uint8, device="cuda")
        power = torch.empty(experts, device="cuda")
        quantize_weights(w.bfloat16(), codes, scales, power)
        return codes, scales, power

    w13, w2 = quantized(2 * width, hidden), quantized(hidden, width)
    return ExpertWeights(w13[0], w13[1], w2[0], w2[1], w13[2], w13[2], w2[2])


def worst_error(weights: ExpertWeights, layer: Layer, tokens: int) -> float:
    """Return the largest error of fc1 over the bound that `kernels.moe` states."""
    block = block_of(tokens * SLOTS, EXPERTS)
    routed = Routed.make(tokens, block)
    spread = 2.0 ** torch.randint(-20, 20, (tokens, 1), device="cuda")
    fp4 = quantize_activation((torch.randn(tokens, HIDDEN, device="cuda") * spread).bfloat16())
    one = torch.ones((), device="cuda")
    x_hat = Fp4Tensor(fp4.codes_u8, fp4.scales_u8, one, NVFP4_BLOCK).dequantize(torch.bfloat16)
    y = torch.empty(tokens * SLOTS, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    router = torch.ones(tokens, SLOTS, device="cuda")
    multiply(x_hat, layer.w13, layer.locks, Sorted.of(routed, block), router, SLOTS, y)
    experts_R = routed.ids.flatten().long()
    worst = 0.0
    for piece in torch.arange(tokens * SLOTS, device="cuda").split(32):
        which = experts_R[piece]
        codes = unpack_nibbles(weights.w13_codes[which])
        w = Fp4Tensor(codes, weights.w13_scales[which], one, NVFP4_BLOCK).dequantize(torch.float64)
        inputs = x_hat[piece // SLOTS].double()
        exact = torch.einsum("roi,ri->ro", w, inputs)
        size = torch.einsum("roi,ri->ro", w.abs(), inputs.abs())
        allowed = (HIDDEN + 1) * FP32_ULP * size * (1 + BF16_HALF) + BF16_HALF * exact.abs()
        error = (y[piece].double() - exact).abs() / (allowed + 1e-38)
        # NaN stays the largest.
        worst = max(float(error.max()), worst)
    return worst


def check() -> float:
    """Return the largest error over the bound, of batches that use every kind of block.

    Raises:
        BeyondBound: it is more than the bound.
    """
    weights = spread_weights(EXPERTS, HIDDEN, WIDTH)
    layer = Layer.repack(weights)
    worst = max(worst_error(weights, layer, tokens) for tokens in (700, 128, 8, 1))
    if not worst <= 1:
        raise BeyondBound(f"error {worst:.2f} of what the order of FP32 sums explains")
    return worst


def gemm_times(layers: list[Layer], tokens: int) -> float:
    """Microseconds of both GEMMs."""
    rows = tokens * SLOTS
    block = block_of(rows, EXPERTS)
    by_expert = [Sorted.of(Routed.make(tokens, block), block) for _ in layers]
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    h = torch.randn(rows, WIDTH, device="cuda").bfloat16()
    both = torch.empty(rows, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    y = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    router = torch.ones(tokens, SLOTS, device="cuda")

    def call(index: int) -> None:
        layer, sorted_rows = layers[index], by_expert[index]
        multiply(x, layer.w13, layer.locks, sorted_rows, router, SLOTS, both)
        multiply(h, layer.w2, layer.locks, sorted_rows, router, 1, y)

    return microseconds(call, len(layers))
