"""Which values of a row a tensor-parallel rank computes: an expert's width and KV heads are split.

The inputs of fc1 and the routes are the same on every rank, so nothing of them is split. Sizes and
places are those of the whole model, whatever a layout keeps of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from bridge.errors import LayoutError
from bridge.formats import NVFP4_BLOCK
from bridge.layout.shape import ModelShape
from bridge.layout.site import Site

Bounds = tuple[int, int]


@dataclass(frozen=True)
class TensorSlice:
    """Values [start, stop) of fc2's input in every expert slot, and KV heads; None is all of them.

    fc2     a multiple of 16 each: blocks of FP4 values are not divided
    heads   heads of K and of V
    """

    fc2: Bounds | None = None
    heads: Bounds | None = None

    def check(self, shape: ModelShape) -> None:
        """Raise LayoutError unless it is a part of the model that is not empty."""
        _check("fc2", self.fc2, shape.moe_intermediate_size, NVFP4_BLOCK)
        _check("heads", self.heads, shape.num_kv_heads, 1)

    def values(self, site: Site, shape: ModelShape) -> range:
        """Return which values of a token (and expert slot) are held at a quantized site."""
        match site:
            case Site.FC1:
                return range(shape.hidden_size)
            case Site.FC2:
                return range(*(self.fc2 or (0, shape.moe_intermediate_size)))
            case _:
                first, last = self.heads or (0, shape.num_kv_heads)
                return range(first * shape.head_dim, last * shape.head_dim)

    def within(self, outer: TensorSlice) -> Self:
        """Return this slice, what it leaves open taken from ``outer``.

        Raises:
            LayoutError: it reaches beyond ``outer``.
        """
        return type(self)(
            _inner("fc2", self.fc2, outer.fc2), _inner("heads", self.heads, outer.heads)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the slice as a map of lists."""
        return {
            name: None if bounds is None else list(bounds)
            for name, bounds in (("fc2", self.fc2), ("heads", self.heads))
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the slice that `to_dict` described.

        Raises:
            TypeError, ValueError: it described none.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"{data!r:.60} is not a slice")
        return cls(_bounds(data.get("fc2")), _bounds(data.get("heads")))


ALL_VALUES = TensorSlice()
"""The rows of an engine of one rank, and of a trainer that does not split its model."""


def _check(name: str, bounds: Bounds | None, size: int, multiple: int) -> None:
    if bounds is None:
        return
    start, stop = bounds
    if not 0 <= start < stop <= size or start % multiple or stop % multiple:
        raise LayoutError(
            f"{name} is {start} to {stop}: give a part of 0 to {size} in multiples of {multiple}."
        )


def _inner(name: str, bounds: Bounds | None, outer: Bounds | None) -> Bounds | None:
    if bounds is None or outer is None:
        return outer if bounds is None else bounds
    if not outer[0] <= bounds[0] <= bounds[1] <= outer[1]:
        raise LayoutError(
            f"{name} {bounds[0]} to {bounds[1]} were asked for, but the record holds "
            f"{outer[0]} to {outer[1]}."
        )
    return bounds


def _bounds(value: Any) -> Bounds | None:
    if value is None:
        return None
    start, stop = value
    if type(start) is not int or type(stop) is not int:
        raise TypeError(f"{value!r:.60} is not a pair of integers")
    return start, stop
