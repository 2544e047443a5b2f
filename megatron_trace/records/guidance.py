"""The choice of what a micro-batch follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bridge.errors import TraceError
from bridge.formats import FULL_SCALE_BITS, SCALE_BITS
from bridge.fp4.bit_planes import MAX_BITS
from bridge.fp4.guided_rounding import MatchRule
from bridge.layout import RecordLayout, Site


class GuidanceError(TraceError):
    """The choice of bits, layers or sites asks for more than the records hold."""


@dataclass(frozen=True)
class Guidance:
    """Which part of the records a micro-batch follows, and what a gap means.

    bits         low bits of the recorded code words to follow; None takes all that were recorded
    scale_bits   bits of the recorded block scales to follow, 8 or 2; None takes all that were
                 recorded. With 2 of whole scales the report also says how many were read wrong
    layers       layers whose sites are guided; None takes all that were recorded
    sites        sites that are guided (`Site.ROUTES` replays the routing); None takes all
    reading      how few bits name a code word, see `bridge.fp4.guided_rounding.MatchRule`
    compare      count agreement with the rollout's full code words; needs 4-bit records
    on_missing   "error" refuses a micro-batch with gaps, "round_to_nearest" counts them
    """

    bits: int | None = None
    scale_bits: int | None = None
    layers: tuple[int, ...] | None = None
    sites: tuple[Site, ...] | None = None
    reading: MatchRule = MatchRule.PARITY
    compare: bool = False
    on_missing: Literal["error", "round_to_nearest"] = "error"

    def check(self, layout: RecordLayout) -> None:
        """Refuse a choice that `layout` does not hold.

        Raises:
            GuidanceError: naming what is missing from the records.
        """
        if self.bits is not None and not 1 <= self.bits <= layout.bits:
            raise GuidanceError(
                f"Guidance by {self.bits} bit(s) was asked for, the records hold {layout.bits}: "
                f"capture more with --trace-bits or follow at most {layout.bits}."
            )
        if self.scale_bits is not None and (
            self.scale_bits not in SCALE_BITS or self.scale_bits > layout.scale_bits
        ):
            raise GuidanceError(
                f"Guidance by {self.scale_bits} bits of a block scale was asked for, the records "
                f"hold {layout.scale_bits}: capture with --trace-scale-bits {FULL_SCALE_BITS} and "
                f"follow {' or '.join(map(str, SCALE_BITS))}."
            )
        if self.compare and layout.bits != MAX_BITS:
            raise GuidanceError(
                f"Agreement is counted against full code words, but the records hold {layout.bits} "
                f"bit(s): capture with --trace-bits {MAX_BITS} or pass compare=False."
            )
        if Site.FC2 in layout.sites and Site.ROUTES not in layout.sites:
            raise GuidanceError(
                "The records hold fc2 without routes, so no expert slot can be told: add routes to "
                "--trace-sites."
            )
        if layout.tensor_slice.fc2 is not None:
            # They travel with the tokens to ranks that compute other parts.
            raise GuidanceError(
                "The records hold a part of every expert's width: fetch fc2 whole and let the "
                "ranks that share an expert take their parts."
            )
        layout.narrow(self.layers, self.sites)
