"""The whole MoE layer on a GPU: `experts.run_experts` as kernels, safe inside a CUDA graph.

Equal to the reference but for the order in which FP32 sums are taken. With u = 2^-23, each of the
two GEMMs differs from the exact dot product of the same operands by at most
(I + 1) * u * sum |x * w| before it is rounded to BF16; code words, scales and operands are equal
bit for bit whenever the numbers they are made of are.

Shape legend: T tokens, K expert slots, R = T * K, H hidden size, I expert width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_trace.kernels.combine import combine
from sglang_trace.kernels.fc1_quantize import quantize_tokens
from sglang_trace.kernels.fc2_quantize import quantize_expert_slots
from sglang_trace.kernels.grouped_gemm import DECODE, FEW, PREFILL, TileShape, multiply
from sglang_trace.kernels.staging_columns import LayerColumns
from sglang_trace.kernels.tiles import most_tiles, sort_rows


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's experts as `TraceNvfp4MoEMethod` keeps them.

    w13_codes   uint8 [E, 2I, H/2], gate above up      w13_scales  uint8 [E, 2I, H/16] E4M3
    w2_codes    uint8 [E, H, I/2]                      w2_scales   uint8 [E, H, I/16] E4M3
    gate_scale, up_scale, down_scale                   float32 [E], powers of two
    """

    w13_codes: Tensor
    w13_scales: Tensor
    w2_codes: Tensor
    w2_scales: Tensor
    gate_scale: Tensor
    up_scale: Tensor
    down_scale: Tensor


# Rows are "few" when at most one expert in this many has any.
FEW_OF_EXPERTS = 8


class Workspace:
    """Memory of one pass of at most `most_tokens` tokens through a layer.

    Two buffers serve four intermediates: fc1's operand is dead once gate and up are computed, and
    those are dead once fc2's operand is.

    `TraceNvfp4MoEMethod` makes one a pass and layer. Dropped when the layer is done, its memory is
    what torch's allocator hands to the next layer, so it grows with neither layers nor steps; while
    a CUDA graph is recorded it comes from the graph's pool, where every replay finds it again.
    """

    def __init__(
        self,
        most_tokens: int,
        slots: int,
        hidden: int,
        width: int,
        num_experts: int,
        device: torch.device | str,
    ) -> None:
        self.most_tokens = most_tokens
        most_rows = most_tokens * slots
        self._operands = torch.empty(
            max(most_tokens * hidden, most_rows * width), dtype=torch.bfloat16, device=device
        )
        self._outputs = torch.empty(
            most_rows * max(2 * width, hidden), dtype=torch.bfloat16, device=device
        )
        shapes = (FEW, DECODE, PREFILL)
        tiles = [most_tiles(most_rows, num_experts, shape.rows) for shape in shapes]
        room = max(tile * shape.rows for tile, shape in zip(tiles, shapes, strict=True))
        self._row_of = torch.empty(room, dtype=torch.int32, device=device)
        self.expert_of = torch.empty(max(tiles), dtype=torch.int32, device=device)
        self.count = torch.empty(1, dtype=torch.int32, device=device)

    def operand(self, rows: int, width: int) -> Tensor:
        """Return BF16 [rows, width] for a GEMM's input."""
        return self._operands[: rows * width].view(rows, width)

    def output(self, rows: int, width: int) -> Tensor:
        """Return BF16 [rows, width] for a GEMM's output."""
        return self._outputs[: rows * width].view(rows, width)

    def row_of(self, tiles: int, tile_rows: int) -> Tensor:
        """Return int32 [tiles, tile_rows] for the sorted rows."""
        return self._row_of[: tiles * tile_rows].view(tiles, tile_rows)


def run_experts(
    x_TH: Tensor,
    router_weights_TK: Tensor,
    expert_ids_TK: Tensor,
    weights: ExpertWeights,
    workspace: Workspace,
    columns: LayerColumns | None,
    out_TH: Tensor,
) -> None:
    """Run the MoE layer on quantized activations, record them at `columns`, write BF16 [T, H].

    Six launches and no allocation; which kernels run depends on T alone. Every one of the T rows
    is recorded, padding too: the host takes the rows of real tokens.
    """
    tokens, hidden = x_TH.shape
    slots = expert_ids_TK.shape[1]
    rows = tokens * slots
    experts, outputs = weights.w13_codes.shape[:2]
    shape = tile_shape(rows, experts)
    most = most_tiles(rows, experts, shape.rows)
    row_of_LM = workspace.row_of(most, shape.rows)
    tiles = (row_of_LM, workspace.expert_of, workspace.count, most)
    sort_rows(expert_ids_TK.flatten(), experts, shape.rows, *tiles[:3])

    x_hat_TH = workspace.operand(tokens, hidden)
    quantize_tokens(x_TH, expert_ids_TK, x_hat_TH, columns)
    gate_up_R2I = workspace.output(rows, outputs)
    fc1 = (weights.w13_codes, weights.w13_scales, weights.gate_scale, weights.up_scale)
    multiply(x_hat_TH, *fc1, gate_up_R2I, *tiles, slots, shape)

    h_hat_RI = workspace.operand(rows, outputs // 2)
    quantize_expert_slots(gate_up_R2I, slots, h_hat_RI, columns)
    y_RH = workspace.output(rows, hidden)
    fc2 = (weights.w2_codes, weights.w2_scales, weights.down_scale, weights.down_scale)
    multiply(h_hat_RI, *fc2, y_RH, *tiles, 1, shape)
    combine(y_RH, router_weights_TK, expert_ids_TK, experts, out_TH)


def tile_shape(rows: int, num_experts: int) -> TileShape:
    """Return the prefill tile once an expert's rows fill half of it on average."""
    if rows >= num_experts * PREFILL.rows // 2:
        return PREFILL
    return FEW if rows <= num_experts // FEW_OF_EXPERTS else DECODE
