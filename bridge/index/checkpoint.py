"""The index in a file: a start reads it and replays only newer journal entries.

A checkpoint is the catalog before entry ``next``, in plain values that name no code
(`bridge.index.tables.saved`). Only the code that wrote it may use it, and only if it is intact. If
the code of the index has changed or a bit has flipped, the daemon replays the whole journal, which
gives the same index. The file:

    magic with the number of this format | checksum of the code | next | deletions | bytes of head
    head: the catalog's snapshot in msgpack; arrays are replaced by their type and shape
    the arrays' bytes, in the order of the head
    XXH3 checksum of everything before
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_digest

from bridge.index.catalog import Catalog
from bridge.index.tables.saved import Saved, UnusableCheckpoint
from bridge.store.base import Position
from bridge.wire.envelope import Buffer

_MAGIC = b"bridge index 2\n"
_PREAMBLE = struct.Struct(f"<{len(_MAGIC)}s16sQQQ")
_SUM_BYTES = 16
_CHUNK_BYTES = 1 << 20
_ARRAY = 1  # type of a msgpack extension
_ARRAY_BYTES = 64  # of its type and shape at most
# msgpack allocates a list before it reads the items. The longest list has one item per engine.
_MAX_ITEMS = 1 << 16
_TYPES = {kind: np.dtype(kind) for kind in ("|i1", "|u1", "<i4", "<i8")}
_CODE = ("index", "wire", "layout")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A snapshot of a catalog: everything in its file but the checksum."""

    preamble: bytes
    head: bytes
    arrays: list[NDArray[Any]]

    @classmethod
    def of(cls, catalog: Catalog, position: Position) -> Checkpoint:
        """Take a snapshot of a catalog now."""
        aside = _ArraysAside()
        head: bytes = msgpack.packb(catalog.snapshot(), default=aside)
        standing = (position.next, position.deletions, len(head))
        return cls(_PREAMBLE.pack(_MAGIC, _code(), *standing), head, aside.arrays)

    def nbytes(self) -> int:
        """Return the bytes of the file."""
        arrays = sum(array.nbytes for array in self.arrays)
        return len(self.preamble) + len(self.head) + arrays + _SUM_BYTES

    def chunks(self) -> Iterator[Buffer]:
        """Yield the content of the file; the last chunk is its checksum."""
        total = xxh3_128()
        for chunk in self._chunks():
            total.update(chunk)
            yield chunk
        yield total.digest()

    def _chunks(self) -> Iterator[Buffer]:
        yield self.preamble
        yield self.head
        for array in self.arrays:
            content = array.reshape(-1).view(np.uint8).data
            for begin in range(0, len(content), _CHUNK_BYTES):
                yield content[begin : begin + _CHUNK_BYTES]


def read_checkpoint(content: Buffer) -> tuple[Catalog, Position]:
    """Return the catalog of a file; raise UnusableCheckpoint."""
    whole = memoryview(content)
    if whole[: len(_MAGIC)] != _MAGIC:
        raise UnusableCheckpoint("it is not of this version's format")
    body, total = whole[:-_SUM_BYTES], whole[-_SUM_BYTES:]
    if len(body) < _PREAMBLE.size or total != xxh3_128_digest(body):
        raise UnusableCheckpoint("it is damaged")
    _, code, following, deletions, length = _PREAMBLE.unpack_from(body)
    if code != _code():
        raise UnusableCheckpoint("another version wrote it")
    try:
        return _catalog(body[_PREAMBLE.size :], length), Position(following, deletions)
    except UnusableCheckpoint:
        raise
    except Exception as error:  # a bad file can raise any error; the journal has all data
        raise UnusableCheckpoint(f"{type(error).__name__}: {error}") from error


def _catalog(content: memoryview, length: int) -> Catalog:
    """Return the catalog of a head of ``length`` bytes and the arrays behind it."""
    if length > len(content):
        raise UnusableCheckpoint("its head is longer than the file")
    arrays = _ArraysOf(content[length:])
    head = msgpack.unpackb(
        content[:length],
        ext_hook=arrays,
        max_array_len=_MAX_ITEMS,
        max_map_len=_MAX_ITEMS,
        max_bin_len=0,
        max_ext_len=_ARRAY_BYTES,
    )
    if len(arrays.rest) or type(head) is not dict:
        raise UnusableCheckpoint("its head does not match its arrays")
    return Catalog.restore(Saved(head))


@dataclass(slots=True)
class _ArraysAside:
    """Collects arrays and replaces each by its type and shape in the head."""

    arrays: list[NDArray[Any]] = field(default_factory=list)

    def __call__(self, value: object) -> msgpack.ExtType:
        if not isinstance(value, np.ndarray) or value.dtype.str not in _TYPES:
            raise TypeError(f"{type(value).__name__} cannot be stored in a checkpoint")
        self.arrays.append(np.ascontiguousarray(value))
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, *value.shape]))


@dataclass(slots=True)
class _ArraysOf:
    """Reads the arrays of a head one after the other; ``rest`` has the unread bytes."""

    rest: memoryview

    def __call__(self, code: int, named: bytes) -> NDArray[Any]:
        kind, *shape = msgpack.unpackb(named)
        if code != _ARRAY or not all(type(extent) is int and extent >= 0 for extent in shape):
            raise UnusableCheckpoint("its head has an invalid array")
        dtype = _TYPES[kind]
        nbytes = dtype.itemsize * prod(shape)
        if nbytes > len(self.rest):
            raise UnusableCheckpoint("an array is longer than the file")
        found = np.frombuffer(self.rest, dtype, prod(shape)).reshape(shape)
        self.rest = self.rest[nbytes:]
        return found


@cache
def _code() -> bytes:
    """Return a checksum of the index code: a checkpoint does not contain its rules."""
    package = Path(__file__).parents[1]
    files = sorted(file for part in _CODE for file in (package / part).rglob("*.py"))
    total = xxh3_128()
    for file in files:
        total.update(file.read_bytes())
    return total.digest()
