"""Typed, bounded access to a header that a stranger may have written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from bridge.errors import CorruptMessage

MAX_NAME_CHARS = 1024
MAX_LIST_ITEMS = 1 << 14
MAX_MAP_ITEMS = 1 << 16
MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class Fields:
    """The body of a message; every accessor raises CorruptMessage on a wrong type or size."""

    body: dict[str, Any]

    def text(self, name: str, limit: int = MAX_NAME_CHARS) -> str:
        """Return a string of at most ``limit`` characters."""
        return _text(name, self.body.get(name), limit)

    def name(self, name: str) -> str:
        """Return a string that is not empty."""
        value = self.text(name)
        if not value:
            raise CorruptMessage(f"header field {name} is empty; give it a name")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        value = self.body.get(name)
        if type(value) is not int or not low <= value <= high:
            raise CorruptMessage(f"header field {name} is not an integer in [{low}, {high}]")
        return value

    def boolean(self, name: str) -> bool:
        """Return true or false."""
        value = self.body.get(name)
        if type(value) is not bool:
            raise CorruptMessage(f"header field {name} is neither true nor false")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in [low, high], or None."""
        return None if self.body.get(name) is None else self.integer(name, low, high)

    def mapping(self, name: str, most: int = MAX_MAP_ITEMS) -> dict[str, Any]:
        """Return a map of at most ``most`` items with short strings as keys."""
        value = self.body.get(name)
        if type(value) is not dict or len(value) > most:
            raise CorruptMessage(f"header field {name} is not a map of at most {most} items")
        if not all(type(key) is str and len(key) <= MAX_NAME_CHARS for key in value):
            raise CorruptMessage(
                f"header field {name} has a key that is no text of at most {MAX_NAME_CHARS} "
                "characters"
            )
        return value

    def items(self, name: str, most: int = MAX_LIST_ITEMS) -> list[Any]:
        """Return a list of at most ``most`` items."""
        value = self.body.get(name)
        if type(value) is not list or len(value) > most:
            raise CorruptMessage(f"header field {name} is not a list of at most {most} items")
        return value

    def texts(self, name: str, most: int = MAX_LIST_ITEMS) -> tuple[str, ...]:
        """Return a list of at most ``most`` strings."""
        return tuple(_text(name, item, MAX_NAME_CHARS) for item in self.items(name, most))

    def optional_texts(self, name: str, most: int) -> tuple[str, ...] | None:
        """Return a list of at most ``most`` strings, or None."""
        return None if self.body.get(name) is None else self.texts(name, most)

    def optional_integers(self, name: str, low: int, high: int) -> tuple[int, ...] | None:
        """Return a list of integers in [low, high], or None."""
        return None if self.body.get(name) is None else self.integers(name, low, high)

    def integers(self, name: str, low: int, high: int) -> tuple[int, ...]:
        """Return a list of integers in [low, high]."""
        values = self.items(name)
        if not all(type(value) is int and low <= value <= high for value in values):
            raise CorruptMessage(
                f"header field {name} is not a list of integers in [{low}, {high}]"
            )
        return tuple(values)

    def texts_by_key(self, name: str, most: int = MAX_MAP_ITEMS) -> dict[str, str]:
        """Return a map of at most ``most`` items from string to string."""
        values = self.mapping(name, most)
        return {key: _text(name, value, MAX_NAME_CHARS) for key, value in values.items()}


def _text(name: str, value: object, limit: int) -> str:
    if not isinstance(value, str) or len(value) > limit:
        raise CorruptMessage(f"header field {name} is not a text of at most {limit} characters")
    return value


def array(frame: memoryview, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """View a frame as a read-only array; raise CorruptMessage when its size is not the shape's."""
    kind = np.dtype(dtype)
    expected = kind.itemsize
    for extent in shape:
        expected *= extent
    if frame.nbytes != expected:
        raise CorruptMessage(
            f"a frame has {frame.nbytes} bytes where {expected} are announced; resend the message"
        )
    if expected == 0:
        return np.empty(shape, dtype=kind)
    values = np.frombuffer(frame, dtype=kind).reshape(shape)
    values.flags.writeable = False
    return values


def vector(frame: memoryview, dtype: DTypeLike, most: int) -> NDArray[Any]:
    """View a frame as a vector of 1 to ``most`` items."""
    count = frame.nbytes // np.dtype(dtype).itemsize
    if not 1 <= count <= most:
        raise CorruptMessage(f"a frame holds {count} items and 1 to {most} are allowed")
    return array(frame, dtype, (count,))


def wire_bytes(values: NDArray[Any], dtype: DTypeLike) -> memoryview:
    """View an array as the bytes of a frame, in wire order; copies only if it has to."""
    contiguous = np.ascontiguousarray(values, dtype=np.dtype(dtype))
    return contiguous.reshape(-1).view(np.uint8).data
