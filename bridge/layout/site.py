"""Where in the model a record is taken, and one such place read back from rows.

Shape legend: T rows, K expert slots of a token (top-k), N values of a site.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from bridge.errors import LayoutError
from bridge.formats import FULL_SCALE_BITS, NVFP4_BLOCK

if TYPE_CHECKING:
    from torch import Tensor


class Site(StrEnum):
    """A place in the model whose code words (or expert ids) are recorded."""

    FC1 = "fc1"
    FC2 = "fc2"
    K = "k"
    V = "v"
    ROUTES = "routes"


class Part(StrEnum):
    """The halves of a row, by when they travel."""

    FORWARD = "forward"
    KV = "kv"


class Kind(StrEnum):
    """What the bytes of a field hold."""

    CODES = "codes"
    SCALES = "scales"
    TOKEN_SCALE = "token_scale"
    ROUTES = "routes"


PART_OF = {
    Site.ROUTES: Part.FORWARD,
    Site.FC1: Part.FORWARD,
    Site.FC2: Part.FORWARD,
    Site.K: Part.KV,
    Site.V: Part.KV,
}


@dataclass(frozen=True)
class SiteRecord:
    """One site of one layer in many rows, as views or copies of the rows' bytes.

    planes_u8    uint8 [T, bits * N / 8], fc2: [T, K, bits * N / 8]
    scales_u8    uint8 [T, N / 16] E4M3 codes, fc2: [T, K, N / 16]; of 2 bits: as packed by
                 `bridge.fp4.scale_bits`
    token_scale  float32 [T, 1], fc2: [T, K, 1]; None for k and v, whose scale is the layer's
    bits         bits kept of each code word
    scale_bits   bits kept of each block scale, 8 or 2
    """

    planes_u8: Tensor
    scales_u8: Tensor
    token_scale: Tensor | None
    bits: int
    scale_bits: int

    @property
    def width(self) -> int:
        """N, the values of one token (and expert slot)."""
        return self.planes_u8.shape[-1] * 8 // self.bits

    def low_codes(self) -> Tensor:
        """Return the low `bits` bits of every code word: uint8 [T, N], fc2: [T, K, N]."""
        from bridge.fp4.bit_planes import unpack_planes

        return unpack_planes(self.planes_u8, self.bits, self.width)

    def low_scales(self) -> Tensor:
        """Return the low 2 bits of every block scale: uint8 [T, N / 16], fc2: [T, K, N / 16]."""
        from bridge.fp4.scale_bits import LOW_SCALE_MASK, unpack_low_scales

        if self.scale_bits == FULL_SCALE_BITS:
            return self.scales_u8 & LOW_SCALE_MASK
        return unpack_low_scales(self.scales_u8, self.width // NVFP4_BLOCK)

    def effective_scale(self, global_scale: Tensor | float = 1.0) -> Tensor:
        """Return block scale * global scale: float32 [T, N / 16], fc2: [T, K, N / 16].

        The global scale is the token's if the record holds one, else `global_scale`: for k and v
        pass the engine's scale of the layer.

        Raises:
            LayoutError: if the record holds only the low bits of the block scales.
        """
        from bridge.fp4.nvfp4 import decode_e4m3

        if self.scale_bits != FULL_SCALE_BITS:
            raise LayoutError(
                f"The record holds {self.scale_bits} bits of a block scale: read them next to the "
                "trainer's own with bridge.fp4.scale_bits, or capture with --trace-scale-bits 8."
            )

        scale = global_scale if self.token_scale is None else self.token_scale
        return decode_e4m3(self.scales_u8) * scale
