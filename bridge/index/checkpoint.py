"""The index in a file, so that a start reads that and replays only what was told after it.

A checkpoint is the catalog as it was before entry ``next``. It is used only by the code that wrote
it and only whole: another version of the index, a bit that flipped or a class that has no place in
an index, and the journal is replayed from its beginning, which gives the same index. Objects are
pickled and nothing but the index's own classes is made of what is read; all arrays stand apart, end
to end, because there may be millions of them.
"""

from __future__ import annotations

import ast
import io
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_128, xxh3_128_digest

import bridge
from bridge.index.catalog import Catalog
from bridge.store.base import Position
from bridge.wire.envelope import Buffer

_MAGIC = b"bridge index 1\n"
_SUM_BYTES = 16
_ARRAYS_A_CHUNK = 4096
_length = struct.Struct("<Q")
_PACKAGES = ("bridge.index.", "bridge.wire.", "bridge.layout.", "bridge.errors.")
_CODE = ("index", "wire", "layout")
_PLAIN = (set, frozenset, Counter, OrderedDict, defaultdict, deque, bytearray)


class UnusableCheckpoint(Exception):
    """The file is damaged, or another version of the code wrote it."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A catalog in parts that do not change any more: pickled objects, and arrays by their type."""

    position: Position
    objects: bytes
    arrays: dict[str, list[NDArray[Any]]]

    @classmethod
    def of(cls, catalog: Catalog, position: Position) -> Checkpoint:
        """Take a catalog at this moment; arrays are copied."""
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(catalog)
        return cls(position, stream.getvalue(), pickler.arrays)

    def nbytes(self) -> int:
        """Return about how long the file is."""
        return len(self.objects) + sum(
            array.nbytes for kind in self.arrays.values() for array in kind
        )

    def chunks(self) -> Iterator[Buffer]:
        """Yield the content of a file, which ends with its checksum."""
        head: bytes = msgpack.packb(
            {
                "code": _code(),
                "next": self.position.next,
                "deletions": self.position.deletions,
                "objects": self.objects,
                "arrays": {
                    kind: sum(array.nbytes for array in arrays)
                    for kind, arrays in self.arrays.items()
                },
            }
        )
        total = xxh3_128()
        for chunk in self._chunks(head):
            total.update(chunk)
            yield chunk
        yield total.digest()

    def _chunks(self, head: bytes) -> Iterator[Buffer]:
        yield _MAGIC
        yield _length.pack(len(head))
        yield head
        for arrays in self.arrays.values():
            for begin in range(0, len(arrays), _ARRAYS_A_CHUNK):
                yield np.concatenate(arrays[begin : begin + _ARRAYS_A_CHUNK]).tobytes()


def read_checkpoint(content: Buffer) -> tuple[Catalog, Position]:
    """Return the catalog of a file; raise UnusableCheckpoint."""
    whole = memoryview(content)
    body, total = whole[:-_SUM_BYTES], whole[-_SUM_BYTES:]
    if body[: len(_MAGIC)] != _MAGIC or total != xxh3_128_digest(body):
        raise UnusableCheckpoint("it is damaged")
    at = len(_MAGIC) + _length.size
    (length,) = _length.unpack_from(body, len(_MAGIC))
    head = msgpack.unpackb(body[at : at + length])
    if head["code"] != _code():
        raise UnusableCheckpoint("another version wrote it")
    at += length
    arrays: dict[str, NDArray[Any]] = {}
    try:
        for kind, nbytes in head["arrays"].items():
            arrays[kind] = np.frombuffer(body[at : at + nbytes], _type(kind))
            at += nbytes
        catalog = _Unpickler(io.BytesIO(head["objects"]), arrays).load()
    except Exception as error:  # whatever a file can make of a reader: the journal has it all
        raise UnusableCheckpoint(f"{type(error).__name__}: {error}") from error
    if not isinstance(catalog, Catalog):
        raise UnusableCheckpoint("it is not an index")
    return catalog, Position(head["next"], head["deletions"])


def array_at(kind: str, begin: int, shape: tuple[int, ...]) -> NDArray[Any]:
    """Stand in a pickle for an array; `_Unpickler` calls another function in its place."""
    raise NotImplementedError


class _Pickler(pickle.Pickler):
    """Puts arrays aside, by type, and leaves in their place where they begin."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.arrays: dict[str, list[NDArray[Any]]] = {}
        self._ends: dict[str, int] = {}
        self._kinds: dict[np.dtype[Any], str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is made again."""
        if type(obj) is not np.ndarray:
            return NotImplemented
        kind = self._kinds.get(obj.dtype)
        if kind is None:
            kind = self._kinds[obj.dtype] = repr(np.lib.format.dtype_to_descr(obj.dtype))
            self.arrays[kind], self._ends[kind] = [], 0
        begin = self._ends[kind]
        self._ends[kind] = begin + obj.size
        self.arrays[kind].append(obj.reshape(-1).copy())
        return array_at, (kind, begin, obj.shape)


class _Unpickler(pickle.Unpickler):
    """Makes nothing but classes of the index and arrays."""

    def __init__(self, stream: io.BytesIO, arrays: dict[str, NDArray[Any]]) -> None:
        super().__init__(stream)
        self._arrays = arrays

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that a pickle names."""
        if (module, name) == (__name__, array_at.__name__):
            return self._array_at
        for plain in _PLAIN:
            if (module, name) == (plain.__module__, plain.__name__):
                return plain
        if not f"{module}.".startswith(_PACKAGES) or "." in name:
            raise UnusableCheckpoint(f"{module}.{name} has no place in an index")
        found = super().find_class(module, name)
        if not isinstance(found, type):
            raise UnusableCheckpoint(f"{module}.{name} has no place in an index")
        return found

    def _array_at(self, kind: str, begin: int, shape: tuple[int, ...]) -> NDArray[Any]:
        size = shape[0] if len(shape) == 1 else int(np.prod(shape))
        found = self._arrays[kind][begin : begin + size].copy()
        return found if len(shape) == 1 else found.reshape(shape)


def _type(kind: str) -> np.dtype[Any]:
    found = np.lib.format.descr_to_dtype(ast.literal_eval(kind))
    if found.hasobject:
        raise UnusableCheckpoint("an array of objects has no place in an index")
    return found


@cache
def _code() -> str:
    """Return a checksum of the code whose objects a checkpoint holds."""
    package = Path(next(iter(bridge.__path__)))
    files = sorted(file for part in _CODE for file in (package / part).glob("*.py"))
    total = xxh3_64()
    for file in files:
        total.update(file.read_bytes())
    return str(total.hexdigest())
