"""Shared-memory transport: rows between a client and a daemon of one machine without a socket.

A loopback socket copies every record into the kernel and out again, on two threads that compete
with gathering and reading for cores. A daemon that maps the client's memory gathers the rows there
directly. The client creates the segment and offers a buffer of it with every request. A daemon
that cannot map the segment (another machine, user or container) answers through the socket. The
kernel frees the segment when the client and the daemon have both closed it.

The segment is an anonymous file (`memfd_create`) that is sealed against shrinking, so a client
cannot truncate it while the daemon writes. The daemon opens it through /proc, which the kernel
allows processes of the same user. A random key at the beginning of the segment identifies it, so a
process of another container with the same number is not mistaken for the client.

Messages may arrive twice or late. A writer therefore gives the buffer a new stamp before it writes
rows, and sends the stamp with the message that announces them. A reader copies the rows first and
then compares the stamp: if it is unchanged, nobody began to write anything else. This relies on
stores of one core being seen in order, as on x86. Elsewhere a store is seen within nanoseconds,
and at least one Python call lies between the stamp and the first row.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress

from bridge.wire import BufferHandle
from bridge.wire.buffer import MAX_SEGMENT_BYTES

# Every page costs a millisecond beside its bytes, so pages are large. `bridge.client.paging` keeps
# this many pages in flight. Only memory that is written to is allocated.
BUFFER_BYTES = 24 << 20
BUFFERS = 5
_KEY_BYTES = 16
# A cache line at the beginning of a buffer; the stamp takes a part of it.
STAMP_BYTES = 64
_NUMBER_BYTES = 8
_HEAD_BYTES = mmap.PAGESIZE  # the key has a page of its own
_NAME = "sglang-trace"
# Systems without these seals have no memfd_create either.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class ShmSegment:
    """The client's end: a segment of ``buffers`` buffers.

    Raises:
        OSError: this system has no such memory, or not enough.
    """

    def __init__(self, buffers: int = BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        key = secrets.token_bytes(_KEY_BYTES)
        stride = STAMP_BYTES + buffer_bytes
        nbytes = _HEAD_BYTES + buffers * stride
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            self._memory = memoryview(mmap.mmap(self._fd, nbytes))
        except BaseException:
            os.close(self._fd)
            raise
        self._memory[:_KEY_BYTES] = key
        self._free = [
            BufferHandle(
                os.getpid(), self._fd, key.hex(), _HEAD_BYTES + number * stride, buffer_bytes
            )
            for number in range(buffers)
        ]

    def acquire(self) -> BufferHandle | None:
        """Return an unused buffer, the one most likely to be in the CPU caches; None if none."""
        return self._free.pop() if self._free else None

    def release(self, buffer: BufferHandle) -> None:
        """Make a buffer available again; the caller knows that nobody writes to it any more."""
        self._free.append(buffer)

    def memory(self, buffer: BufferHandle) -> memoryview:
        """Return the memory of a buffer: its stamp, then room for rows."""
        return self._memory[buffer.offset : buffer.offset + STAMP_BYTES + buffer.nbytes]

    def close(self) -> None:
        """Close the segment; the kernel frees it when no process maps it any more."""
        os.close(self._fd)
        self._memory = memoryview(b"")


def stamp(memory: memoryview) -> int:
    """Write a new stamp to the memory of a buffer, before any rows; return it."""
    number = secrets.randbits(8 * _NUMBER_BYTES)
    memory[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")
    return number


def stamped(memory: memoryview) -> int:
    """Return the stamp in the memory of a buffer; readers call it after they copied the rows."""
    return int.from_bytes(memory[:_NUMBER_BYTES], "little")


def opened(buffer: BufferHandle) -> memoryview | None:
    """The daemon's end: map the whole segment of a buffer; None if it cannot be mapped."""
    with suppress(OSError, ValueError):
        path = f"/proc/{buffer.pid}/fd/{buffer.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            return None  # opening a device may have side effects
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                return None
            status = os.fstat(fd)
            nbytes = status.st_size
            # Root may open the segments of other users, who could make a write to them fail.
            if status.st_uid != os.geteuid() or not _HEAD_BYTES < nbytes <= MAX_SEGMENT_BYTES:
                return None
            memory = memoryview(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)
        key = bytes(memory[:_KEY_BYTES]).hex()
        if secrets.compare_digest(key.encode(), buffer.key.encode()):
            return memory
    return None
