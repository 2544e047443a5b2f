"""The columns of every row that one rank of an engine sends.

A tensor-parallel rank sends the values that it computed: its KV heads, its part of every expert's
width. An expert-parallel rank sends whole expert slots. They differ from row to row, so each row
lists its slots and has only those:

    bytes of all sites but fc2 | bitmap of the slots it computed | these slots' fc2, in order

Slots are ordered by layer and within a layer as in a row; bit 0 of the bitmap's first byte is the
first slot. All rows of one message have the width of the fullest one, so a row's offset follows
from its index. Bytes behind a row's last slot have no meaning.

Shape legend: n rows, B bytes of a row, C expert slots of a row in all layers, W bytes of a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bridge.errors import LayoutError
from bridge.layout.columns import byte_columns
from bridge.layout.record import RecordLayout
from bridge.layout.shape import check_range
from bridge.layout.site import Part, Site
from bridge.layout.tensor_slice import TensorSlice

MAX_SHARDS = 64
# Fields of all shards together: each is listed in memory.
MAX_SHARD_FIELDS = 1 << 17


@dataclass(frozen=True)
class Shard:
    """The part of the engine's layout that a rank sends, as the layout of its own rows.

    ``by_slot``: of fc2, only the expert slots that this rank computed, which every row lists.
    """

    layout: RecordLayout
    by_slot: bool = False

    def __post_init__(self) -> None:
        if self.by_slot and not self.slots:
            raise LayoutError("A rank that sends slots of fc2 needs a layout that records fc2.")

    def sends(self, part: Part) -> bool:
        """Whether the rank sends rows of this part."""
        return self.layout.row_bytes(part) > 0

    def accepts(self, part: Part, row_bytes: int) -> bool:
        """Whether a message may have rows of ``row_bytes``."""
        if not self.by_slot or part is Part.KV:
            return 0 < row_bytes == self.layout.row_bytes(part)
        slots, rest = divmod(row_bytes - self.head_bytes, self.slot_bytes)
        return rest == 0 and 0 <= slots <= self.slots

    # --- what lies where in a row of slots

    @property
    def slots(self) -> int:
        """C, the expert slots of a row in all layers."""
        return len(self.layout.site_layers(Site.FC2)) * self.layout.shape.top_k

    @cached_property
    def slot_bytes(self) -> int:
        """W, the bytes of one expert slot."""
        return int(self.slot_columns.shape[1])

    @property
    def head_bytes(self) -> int:
        """Bytes before the first slot: all other sites and the bitmap."""
        return len(self.other_columns) + -(-self.slots // 8)

    @cached_property
    def slot_columns(self) -> NDArray[np.int64]:
        """Columns of every slot in a row of the shard's layout: int64 [C, W]."""
        columns = [
            np.arange(held.start, held.stop)
            for layer in self.layout.site_layers(Site.FC2)
            for held in (self.layout.columns(Site.FC2, layer),)
        ]
        return np.concatenate(columns).reshape(self.slots, -1)

    @cached_property
    def other_columns(self) -> NDArray[np.int64]:
        """Columns of all that is not fc2 in a row of the shard's layout: int64 [.]."""
        every = np.arange(self.layout.row_bytes(Part.FORWARD))
        return np.setdiff1d(every, self.slot_columns.reshape(-1), assume_unique=True)

    # --- rows of slots

    def pack(self, rows_nB: NDArray[np.uint8], computed_nC: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """Return the rows to send of rows in the shard's layout, with the slots it computed."""
        counts_n = np.count_nonzero(computed_nC, axis=1)
        head, most = self.head_bytes, int(counts_n.max(initial=0))
        packed = np.zeros((len(rows_nB), head + most * self.slot_bytes), dtype=np.uint8)
        others = len(self.other_columns)
        packed[:, :others] = rows_nB[:, self.other_columns]
        packed[:, others:head] = np.packbits(computed_nC, axis=1, bitorder="little")
        row, slot = np.nonzero(computed_nC)
        place = (np.cumsum(computed_nC, axis=1) - 1)[row, slot]
        cells = packed[:, head:].reshape(len(rows_nB), most, self.slot_bytes)
        cells[row, place] = rows_nB[row[:, None], self.slot_columns[slot]]
        return packed

    def unpacked(self, packed: NDArray[np.uint8]) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
        """Return which slots rows hold, bool [n, C], and these slots' bytes uint8 [n, most, W].

        A row whose bitmap names more slots than it has room for holds none.
        """
        others, head = len(self.other_columns), self.head_bytes
        bits = np.unpackbits(packed[:, others:head], axis=1, count=self.slots, bitorder="little")
        room = (packed.shape[1] - head) // self.slot_bytes  # no -1: there may be no rows
        cells = packed[:, head:].reshape(len(packed), room, self.slot_bytes)
        bits[np.count_nonzero(bits, axis=1) > cells.shape[1]] = 0
        return bits.astype(np.bool_), cells

    # --- over the wire

    def to_dict(self) -> dict[str, Any]:
        """Return what of the engine's layout is sent, as a map."""
        return {
            "layers": list(self.layout.layers),
            "sites": [str(site) for site in self.layout.sites],
            "tensor_slice": self.layout.tensor_slice.to_dict(),
            "by_slot": self.by_slot,
        }

    @classmethod
    def from_dict(cls, full: RecordLayout, data: Mapping[str, Any]) -> Self:
        """Return the shard of an engine's layout that `to_dict` described.

        Raises:
            LayoutError, KeyError, TypeError, ValueError: it describes none.
        """
        kept = TensorSlice.from_dict(data["tensor_slice"])
        layers, sites = data["layers"], tuple(Site(site) for site in data["sites"])
        if not all(type(layer) is int for layer in layers) or type(data["by_slot"]) is not bool:
            raise TypeError("a shard's layers are integers and by_slot is true or false")
        return cls(full.narrow(layers, sites, kept), data["by_slot"])


def check_shards(full: RecordLayout, shards: Sequence[Shard]) -> None:
    """Refuse shards that leave bytes of a row out.

    Bytes may be sent more than once: ranks that do not agree on them make the row a missing one.

    Raises:
        LayoutError: naming what is missing, or that there are too many.
    """
    check_range("shards of an engine", len(shards), 1, MAX_SHARDS)
    fields = len(shards) * sum(len(full.fields(part)) for part in Part)
    check_range("fields of all shards", fields, 0, MAX_SHARD_FIELDS)
    if len({shard.layout.site_layers(Site.FC2) for shard in shards if shard.by_slot}) > 1:
        raise LayoutError("Ranks that send slots of fc2 must send slots of the same layers.")
    for part in Part:
        sent = np.zeros(full.row_bytes(part), dtype=np.bool_)
        for shard in shards:
            sent[byte_columns(full, shard.layout, part)] = True
        if not sent.all():
            raise LayoutError(
                f"The engine's ranks send {int(sent.sum())} of the {len(sent)} bytes of a "
                f"{part} row: let one of them send every site, layer and value that is recorded."
            )
