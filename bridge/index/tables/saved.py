"""The plain form of the index in a checkpoint: numbers, texts, maps, lists and arrays.

Every class of the index has `snapshot` and `restore`. Long lists are stored as columns: one array
for all items, and the lengths of the lists. A snapshot shares no array with the index, because the
index goes on changing. `Saved` returns arrays of the file, which `restore` copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)
Snapshot = dict[str, Any]


class UnusableCheckpoint(Exception):
    """A checkpoint is damaged or of another version; the daemon reads the journal instead."""


def integers(values: Iterable[int]) -> NDArray[np.int64]:
    """Return numbers as a column, int64 [n]."""
    return np.fromiter(values, np.int64)


def lengths(values: Iterable[Sized]) -> NDArray[np.int64]:
    """Return the number of items of each value, int64 [n]."""
    return np.fromiter(map(len, values), np.int64)


def table(rows: Iterable[Sequence[int]], width: int) -> NDArray[np.int64]:
    """Return rows of ``width`` numbers as int64 [n, width]."""
    return integers(chain.from_iterable(rows)).reshape(-1, width)


def texts(values: Collection[str]) -> Snapshot:
    """Return the joined texts in UTF-8, and the length of each text in characters."""
    joined = np.frombuffer("".join(values).encode(), np.uint8)
    return {"lengths": lengths(values), "utf8": joined}


def lists(values: Collection[Collection[int]]) -> Snapshot:
    """Return the joined lists of numbers, and the length of each list."""
    return {"lengths": lengths(values), "values": integers(chain.from_iterable(values))}


def cut(values: NDArray[Number], lengths_N: NDArray[np.int64]) -> list[NDArray[Number]]:
    """Return copies of consecutive parts of these lengths."""
    return [values[begin:end].copy() for begin, end in _bounds(len(values), lengths_N)]


def cut_rows(rows: NDArray[np.int64], lengths_N: NDArray[np.int64]) -> Iterator[list[list[int]]]:
    """Yield consecutive rows of a `table`, ``lengths_N`` rows at a time."""
    items = rows.tolist()
    return (items[begin:end] for begin, end in _bounds(len(items), lengths_N))


@dataclass(frozen=True, slots=True)
class Saved:
    """The values of one object in a checkpoint; methods raise UnusableCheckpoint on a wrong type.

    Arrays are views of the file and read-only.
    """

    values: dict[str, Any]

    def part(self, name: str) -> Saved:
        """Return the values of a nested object."""
        return _saved(name, self.values.get(name))

    def parts(self, name: str) -> list[Saved]:
        """Return the values of each object in a list."""
        found = self.values.get(name)
        if type(found) is not list:
            raise UnusableCheckpoint(f"{name} is not a list")
        return [_saved(name, item) for item in found]

    def integer(self, name: str) -> int:
        """Return a number."""
        found = self.values.get(name)
        if type(found) is not int:
            raise UnusableCheckpoint(f"{name} is not a number")
        return found

    def array(self, name: str, kind: type[Number], *inner: int) -> NDArray[Number]:
        """Return an array of any length with items of this type and shape."""
        found = self.values.get(name)
        if not isinstance(found, np.ndarray) or found.dtype != kind or found.shape[1:] != inner:
            raise UnusableCheckpoint(f"{name} is not an array of the expected type")
        return found

    def integers(self, name: str) -> list[int]:
        """Return the numbers of a column."""
        found: list[int] = self.array(name, np.int64).tolist()
        return found

    def table(self, name: str, width: int) -> NDArray[np.int64]:
        """Return a `table`: int64 [n, width]."""
        return self.array(name, np.int64, width)

    def pairs(self, name: str) -> dict[int, int]:
        """Return a map that was saved as a `table` of its items."""
        return dict(self.table(name, 2).tolist())

    def texts(self, name: str) -> list[str]:
        """Return the texts that `texts` saved."""
        saved = self.part(name)
        joined = str(saved.array("utf8", np.uint8).data, "utf-8")
        bounds = _bounds(len(joined), saved.array("lengths", np.int64))
        return [joined[begin:end] for begin, end in bounds]

    def lists(self, name: str) -> list[list[int]]:
        """Return the lists that `lists` saved."""
        saved = self.part(name)
        values = saved.integers("values")
        bounds = _bounds(len(values), saved.array("lengths", np.int64))
        return [values[begin:end] for begin, end in bounds]


def _saved(name: str, value: object) -> Saved:
    if type(value) is not dict:
        raise UnusableCheckpoint(f"{name} is not a map")
    return Saved(value)


def _bounds(total: int, lengths_N: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of consecutive parts of these lengths, ``total`` items in all."""
    ends: list[int] = np.cumsum(lengths_N).tolist()
    if (lengths_N < 0).any() or (ends[-1] if ends else 0) != total:
        raise UnusableCheckpoint("the lengths do not add up to the number of items")
    return pairwise([0, *ends])
