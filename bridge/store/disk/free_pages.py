"""Find lost pages of an LMDB file: read its table of free pages.

LMDB does not write pages that it allocates and frees in one transaction. If these are the last
pages, the file ends before its last page, but is intact. A truncated file also ends early, and
reading a page beyond the end kills the process (SIGBUS). LMDB's interface does not distinguish the
two, so this module reads the table of free pages (mdb.c: MDB_meta, MDB_page, MDB_node and MDB_db).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_META = struct.Struct("<16xII8xQ")  # page header, magic, version, address, map size
_DB = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, three counts of pages, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction
_PAGE = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_NODE = struct.Struct("<HHHH")  # low and high half of the size, flags, bytes of the key
_MAGIC = 0xBEEFC0DE
_NO_PAGE = (1 << 64) - 1
_BRANCH, _LEAF, _BIG = 1, 2, 1
_MAX_DEPTH = 32


class UnreadablePages(Exception):
    """The table of free pages is damaged or cut off."""


def lost_pages(file: int, page_bytes: int) -> int:
    """Count the pages beyond the end of the file (a descriptor) that are not free.

    Raises:
        UnreadablePages: the table of free pages is not readable.
    """
    try:
        last, root = _newest(file, page_bytes)
        first = os.fstat(file).st_size // page_bytes
        beyond = np.arange(first, last + 1)
        free = np.concatenate([np.empty(0, np.int64), *_free(file, page_bytes, root)])
        return int(np.count_nonzero(~np.isin(beyond, free)))
    except (struct.error, ValueError, IndexError) as error:
        raise UnreadablePages(str(error)) from error


def _newest(file: int, page_bytes: int) -> tuple[int, int]:
    """Return (last page, root of the table of free pages) as of the last transaction."""
    found = []
    for page in (0, 1):
        meta = os.pread(file, page_bytes, page * page_bytes)
        magic, _, _ = _META.unpack_from(meta)
        if magic != _MAGIC:
            continue
        root = _DB.unpack_from(meta, _META.size)[-1]
        last, transaction = _TAIL.unpack_from(meta, _META.size + 2 * _DB.size)
        found.append((transaction, last, root))
    if not found:
        raise ValueError("no meta page")
    _, last, root = max(found)
    return last, root


def _free(file: int, page_bytes: int, root: int) -> Iterator[NDArray[np.int64]]:
    """Yield the page numbers of every record of the table."""
    waiting = [] if root == _NO_PAGE else [(root, 0)]
    while waiting:
        number, depth = waiting.pop()
        page = _read(file, page_bytes, number, 1)
        _, _, flags, lower, _ = _PAGE.unpack_from(page)
        if not flags & (_BRANCH | _LEAF) or depth > _MAX_DEPTH:
            raise ValueError(f"page {number} is no node of the table")
        for index in range((lower - _PAGE.size) // 2):
            (at,) = struct.unpack_from("<H", page, _PAGE.size + 2 * index)
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                waiting.append((low | high << 16 | node_flags << 32, depth + 1))
                continue
            nbytes, at = low | high << 16, at + _NODE.size + key_bytes
            if node_flags & _BIG:
                (first,) = struct.unpack_from("<Q", page, at)
                pages = -(-(_PAGE.size + nbytes) // page_bytes)
                record = _read(file, page_bytes, first, pages)[_PAGE.size :][:nbytes]
            else:
                record = page[at : at + nbytes]
            ids = np.frombuffer(record, dtype="<i8")
            yield ids[1 : 1 + int(ids[0])]


def _read(file: int, page_bytes: int, first: int, pages: int) -> bytes:
    read = os.pread(file, pages * page_bytes, first * page_bytes)
    if len(read) < pages * page_bytes:
        raise ValueError(f"page {first} is beyond the end")
    return read
