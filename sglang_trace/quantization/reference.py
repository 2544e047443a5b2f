"""Experts in NVFP4 W4A4, emulated: code words decide every operand of the GEMMs.

An operand is code word * block scale * power-of-two scale, which is exact in BF16 as in FP32, so
the GEMMs see precisely the quantized numbers. They accumulate in FP32 and their results are rounded
to the activations' dtype, whichever of the two dtypes the weights are held in: on CPUs without BF16
units FP32 is several times faster. The order of accumulation is the BLAS library's; beyond that a
token's result does not depend on the other tokens of the batch.

Shape legend: T tokens, K expert slots of a token, H hidden size, I expert width, E experts,
N rows (token, slot) that one expert serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, token_scale


class ActivationRecorder(Protocol):
    """What wants to see the quantized activations and the routes of one layer."""

    def fc1(self, x_TH: Fp4Tensor) -> None:
        """Take the input of the gate and up projections, one row per token."""

    def fc2(self, h_TKI: Fp4Tensor) -> None:
        """Take the input of the down projection, one row per token and expert slot."""

    def routes(self, expert_ids_TK: Tensor) -> None:
        """Take the expert ids in the router's top-k order."""


def quantize_activation(x: Tensor, group: ProcessGroup | None = None) -> Fp4Tensor:
    """Quantize activations [..., N] to NVFP4 with one power-of-two scale per row.

    `group` are the ranks that hold the other parts of the rows: the scale is of whole rows, and the
    largest of the parts' scales is the one that a row of all parts would have.
    """
    scale = token_scale(x)
    if group is not None:
        all_reduce(scale, ReduceOp.MAX, group)
    return quantize_nvfp4(x, scale)


def rows_by_expert(expert_ids_TK: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (expert, rows) for every expert in use; row = token * K + slot, ascending."""
    flat = expert_ids_TK.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    first = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, order[first : first + count]
        first += count


def gate_up(x_TH: Tensor, w13_E2IH: Tensor, expert_ids_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return silu(gate) * up of every token and slot: [T, K, I] of `dtype`."""
    tokens, slots = expert_ids_TK.shape
    width = w13_E2IH.shape[1] // 2
    h_RI = x_TH.new_empty(tokens * slots, width, dtype=dtype)
    for expert, rows_N in rows_by_expert(expert_ids_TK, w13_E2IH.shape[0]):
        both = F.linear(x_TH[rows_N // slots], w13_E2IH[expert]).to(dtype)
        h_RI[rows_N] = F.silu(both[:, :width]) * both[:, width:]
    return h_RI.view(tokens, slots, width)


def down(h_TKI: Tensor, w2_EHI: Tensor, expert_ids_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the down projection of every token and slot: [T, K, H] of `dtype`."""
    tokens, slots = expert_ids_TK.shape
    h_RI = h_TKI.flatten(0, 1)
    y_RH = h_TKI.new_empty(tokens * slots, w2_EHI.shape[1], dtype=dtype)
    for expert, rows_N in rows_by_expert(expert_ids_TK, w2_EHI.shape[0]):
        y_RH[rows_N] = F.linear(h_RI[rows_N], w2_EHI[expert]).to(dtype)
    return y_RH.view(tokens, slots, -1)


def combine(y_TKH: Tensor, router_weights_TK: Tensor) -> Tensor:
    """Weigh the experts' outputs after fc2 and add them up in float32; returns y's dtype."""
    weighted = y_TKH.float() * router_weights_TK.float().unsqueeze(-1)
    return weighted.sum(dim=1).to(y_TKH.dtype)


def run_experts(
    x_TH: Tensor,
    router_weights_TK: Tensor,
    expert_ids_TK: Tensor,
    w13_E2IH: Tensor,
    w2_EHI: Tensor,
    recorder: ActivationRecorder | None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Run the MoE layer on quantized activations and return [T, H].

    `w13_E2IH` (gate above up) and `w2_EHI` are the dequantized weights, in BF16 or FP32. The ranks
    of `group` hold parts of every expert's width, and the sum of what they return is the output.
    """
    expert_ids_TK = expert_ids_TK.long()
    x_fp4 = quantize_activation(x_TH)
    h_TKI = gate_up(x_fp4.dequantize(w13_E2IH.dtype), w13_E2IH, expert_ids_TK, x_TH.dtype)
    h_fp4 = quantize_activation(h_TKI, group)
    if recorder is not None:
        recorder.routes(expert_ids_TK)
        recorder.fc1(x_fp4)
        recorder.fc2(h_fp4)
    y_TKH = down(h_fp4.dequantize(w2_EHI.dtype), w2_EHI, expert_ids_TK, x_TH.dtype)
    return combine(y_TKH, router_weights_TK)
