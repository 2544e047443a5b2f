"""What a decode-attention kernel is given, what it has to read, and what it should return.

Shape legend: B rows of the batch, Q query heads, H KV heads, D head size, T pages of the longest
row, S slots of the pool, L tokens of one row, d = D / 2 packed bytes, b = D / 16 block scales.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bridge.fp4.nvfp4 import NVFP4_BLOCK, Fp4Tensor, unpack_nibbles

LONG = 131_072
SHORTEST = 1024
L2_BYTES = 60 << 20
MOST_SETS = 8
# Powers of two, so that dequantized values are exact in BF16. The second is 1 because FlashInfer
# applies any other with a kernel of its own.
K_SCALE, V_SCALE = 0.5, 1.0
# Block scales of 2^-2 to 2^0.
SCALE_CODES = 0x28, 0x38
DECODED_SLOTS = 1 << 17
# Bits of a stored value, its share of the block scale included.
BF16_BITS, FP8_BITS, NVFP4_BITS = 16.0, 8.0, 4.0 + 8 / NVFP4_BLOCK


@dataclass(frozen=True)
class Case:
    """A shape. `ragged` rows have lengths from 1,024 to `tokens`, evenly on a log scale."""

    name: str
    batch: int
    q_heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    tokens: int = LONG
    page_size: int = 16
    ragged: bool = False

    def lengths(self) -> list[int]:
        """Tokens of every row; ragged ones are shuffled, the same way every time."""
        if not self.ragged:
            return [self.tokens] * self.batch
        spread = torch.logspace(math.log2(SHORTEST), math.log2(self.tokens), self.batch, base=2.0)
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0))
        return spread.round().long()[order].tolist()

    def pages(self) -> list[int]:
        """Pages of every row."""
        return [-(-length // self.page_size) for length in self.lengths()]

    def nbytes(self, bits: float) -> int:
        """What a kernel has to move: keys and values once, page numbers, queries, outputs."""
        values = 2 * sum(self.lengths()) * self.kv_heads * self.head_dim
        ends = 2 * 2 * self.batch * self.q_heads * self.head_dim
        return int(values * bits / 8) + 4 * sum(self.pages()) + ends

    def sets(self) -> int:
        """How many sets of pages to rotate among, for four times the L2 cache of FP4 together."""
        return max(1, min(MOST_SETS, 4 * L2_BYTES // self.nbytes(NVFP4_BITS) + 1))

    def described(self) -> dict[str, Any]:
        """The shape but for the batch, for the JSON."""
        fields = asdict(self)
        del fields["name"], fields["batch"]
        return {"case": self.name, **fields, "kv_tokens": sum(self.lengths())}


HEADLINE = Case("headline", 8)
CASES = (
    HEADLINE,
    Case("batch 1", 1),
    Case("batch 32", 32),
    Case("ragged", 32, ragged=True),
    Case("page 1", 8, page_size=1),
    Case("page 64", 8, page_size=64),
    Case("16 to 1", 8, q_heads=64),
    Case("4 to 1", 8, kv_heads=8),
    Case("head 256", 8, q_heads=16, kv_heads=2, head_dim=256),
    Case("head 64", 8, head_dim=64),
)


class Inputs:
    """A pool in FP4 and `sets` page tables over it that share no page.

    k_codes, v_codes     uint8 [S, H, d]
    k_scales, v_scales   uint8 [S, H, b], E4M3
    tables               of every set int32 [B, T]
    q, out               BF16 [B, Q, D]
    lengths, rows        int32 [B]
    """

    def __init__(self, case: Case, sets: int, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        pages = case.pages()
        # Page 0 stays unused, as in an engine, where it takes what padding writes.
        self.pool_pages = 1 + sets * sum(pages)
        slots = self.pool_pages * case.page_size
        self.k_codes, self.v_codes = (self._bytes(slots, 2, 0, 256) for _ in range(2))
        self.k_scales, self.v_scales = (
            self._bytes(slots, NVFP4_BLOCK, *SCALE_CODES) for _ in range(2)
        )
        order = torch.randperm(self.pool_pages - 1, device=device, dtype=torch.int32) + 1
        self.tables = []
        for pages_of_set in order.split(sum(pages)):
            table = torch.zeros(case.batch, max(pages), dtype=torch.int32, device=device)
            for row, mine in enumerate(pages_of_set.split(pages)):
                table[row, : len(mine)] = mine
            self.tables.append(table)
        self.q = torch.randn(case.batch, case.q_heads, case.head_dim, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.lengths = torch.tensor(case.lengths(), dtype=torch.int32, device=device)
        self.rows = torch.arange(case.batch, dtype=torch.int32, device=device)

    def _bytes(self, slots: int, values: int, low: int, high: int) -> Tensor:
        shape = slots, self.case.kv_heads, self.case.head_dim // values
        return torch.empty(shape, dtype=torch.uint8, device=self.device).random_(low, high)

    @property
    def sm_scale(self) -> float:
        return self.case.head_dim**-0.5

    def paged(self, tensor: Tensor) -> Tensor:
        """[S, H, x] as [pages, page size, H, x]."""
        return tensor.view(self.pool_pages, self.case.page_size, *tensor.shape[1:])

    @cached_property
    def bf16(self) -> tuple[Tensor, Tensor]:
        """Keys and values [S, H, D] that the FP4 pool holds, exactly."""
        return (
            dequantized(self.k_codes, self.k_scales, K_SCALE),
            dequantized(self.v_codes, self.v_scales, V_SCALE),
        )

    def forget_bf16(self) -> None:
        """Give the dequantized pool's memory back."""
        self.__dict__.pop("bf16", None)

    def slots(self, which: int, row: int) -> Tensor:
        """Slots int64 [L] of one row in one set."""
        length, page_size = self.case.lengths()[row], self.case.page_size
        position = torch.arange(length, device=self.device)
        page = self.tables[which][row].long()[position // page_size]
        return page * page_size + position % page_size

    def expected(self, which: int, row: int) -> Tensor:
        """Dequantise, then attention in FP32: [Q, D] of one row."""
        slots_L = self.slots(which, row)
        group = self.case.q_heads // self.case.kv_heads
        k_LHD, v_LHD = (
            dequantized(codes[slots_L], scales[slots_L], scale).float()
            for codes, scales, scale in (
                (self.k_codes, self.k_scales, K_SCALE),
                (self.v_codes, self.v_scales, V_SCALE),
            )
        )
        q_HGD = self.q[row].float().view(self.case.kv_heads, group, -1)
        scores_HGL = torch.einsum("hgd,lhd->hgl", q_HGD, k_LHD) * self.sm_scale
        out_HGD = torch.einsum("hgl,lhd->hgd", scores_HGL.softmax(-1), v_LHD)
        return out_HGD.flatten(0, 1)


def dequantized(codes_SHd: Tensor, scales_SHb: Tensor, scale: float) -> Tensor:
    """BF16 [S, H, D], piece by piece: the reference needs several bytes a value meanwhile."""
    slots, heads, packed = codes_SHd.shape
    out = torch.empty(slots, heads, 2 * packed, dtype=torch.bfloat16, device=codes_SHd.device)
    global_scale = torch.tensor(scale, device=codes_SHd.device)
    for start in range(0, slots, DECODED_SLOTS):
        piece = slice(start, start + DECODED_SLOTS)
        stored = Fp4Tensor(
            unpack_nibbles(codes_SHd[piece]), scales_SHb[piece], global_scale, NVFP4_BLOCK
        )
        out[piece] = stored.dequantize(torch.bfloat16)
    return out


def errors(got_RQD: Tensor, expected_RQD: Tensor) -> dict[str, float]:
    """Largest and root-mean-square difference, over the root-mean-square of what is expected."""
    difference = got_RQD.float() - expected_RQD
    size = expected_RQD.square().mean().sqrt()
    return {
        "max_error": float(f"{float(difference.abs().max() / size):.4g}"),
        "rms_error": float(f"{float(difference.square().mean().sqrt() / size):.4g}"),
    }
