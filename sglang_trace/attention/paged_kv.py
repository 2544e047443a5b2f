"""Keys and values of one layer in a paged NVFP4 pool.

Shape legend: B requests, P KV slots of the pool, H KV heads, d = D / 2 bytes of code words of a
head of size D, b = D / 16 block scales, R rows and E entries of the page table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PagedKV:
    """The keys and values of one layer, and where those of each request are.

    It refers to the tensors it is given and reads nothing from the device, so it may be made while
    a CUDA graph is captured. A value is code word * block scale * global scale.

    k_codes_PHd   uint8 [P, H, D/2], two E2M1 code words per byte, the first in the low half
    k_scales_PHb  uint8 [P, H, D/16], E4M3 block scales
    v_codes_PHd   as the keys'
    v_scales_PHb  as the keys'
    table_RE      int32 [R, E]: row, token // page_size -> KV page; SGLang's ``req_to_token`` is
                  such a table with pages of one KV slot
    rows_B        int32 or int64 [B], each request's row of the table
    lengths_B     int32 or int64 [B], keys of each request, the query tokens' included
    page_size     KV slots of a page, a power of two
    k_scale       global scale of the keys, > 0
    v_scale       global scale of the values, > 0
    """

    k_codes_PHd: Tensor
    k_scales_PHb: Tensor
    v_codes_PHd: Tensor
    v_scales_PHb: Tensor
    table_RE: Tensor
    rows_B: Tensor
    lengths_B: Tensor
    page_size: int
    k_scale: float
    v_scale: float

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k_codes_PHd.shape[1]
