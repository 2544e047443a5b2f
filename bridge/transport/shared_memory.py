"""Memory that a client lends to a bridge of the same machine, so that rows need no socket.

A record on its way through a loopback socket is copied into the kernel and out of it again, by two
threads that take cores from those who gather and read. A bridge that can write into the client's
memory gathers the rows right there. The client makes the memory (so it ends with the client, once
the bridge has let go of it too) and offers it with every question; a bridge that cannot reach it,
because it runs elsewhere, as another user or in a container, answers through the socket as always.

The memory is a file without a name (`memfd_create`) that is sealed against shrinking, so that no
client can pull it away under a bridge that writes to it. The bridge opens it through /proc, which
the kernel allows processes of the same user, and knows by a random key at its beginning that it is
the one that is meant and not that of another process with the same number in another container.

Messages may arrive twice or late. So whoever writes rows to a place first gives it a new stamp,
which goes with the message that tells of them, and whoever reads copies the rows first and looks at
the stamp then: if it is still that one, nobody had begun to write anything else. This counts on a
core's stores being seen in their order, as on x86; elsewhere a store is seen within nanoseconds,
and between the stamp and the first row there is at least one call from Python.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress

from bridge.wire import Place
from bridge.wire.place import MAX_REGION_BYTES

# A page costs a millisecond besides its bytes, so it is large; `bridge.client.paging` has so many
# on their way at a time. Only what is written to takes memory.
PLACE_BYTES = 24 << 20
PLACES = 5
_KEY_BYTES = 16
# Of a place, before its rows: a line of the caches, of which the stamp takes a part.
STAMP_BYTES = 64
_NUMBER_BYTES = 8
_HEAD_BYTES = mmap.PAGESIZE  # the key, alone in its page
_NAME = "sglang-trace"
# Systems without them have no memfd_create either.
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)


class Region:
    """The client's end: memory for some answers at a time.

    Raises:
        OSError: this system has no such memory, or not enough.
    """

    def __init__(self, places: int = PLACES, place_bytes: int = PLACE_BYTES) -> None:
        key = secrets.token_bytes(_KEY_BYTES)
        stride = STAMP_BYTES + place_bytes
        nbytes = _HEAD_BYTES + places * stride
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
            Place(os.getpid(), self._fd, key.hex(), _HEAD_BYTES + number * stride, place_bytes)
            for number in range(places)
        ]

    def borrow(self) -> Place | None:
        """Return a place that nothing else uses, that of which the caches know most, if any."""
        return self._free.pop() if self._free else None

    def give_back(self, place: Place) -> None:
        """Let a place be used again, to which nothing will be written any more."""
        self._free.append(place)

    def memory(self, place: Place) -> memoryview:
        """Return a place: its stamp, then room for rows."""
        return self._memory[place.offset : place.offset + STAMP_BYTES + place.nbytes]

    def close(self) -> None:
        """Let go of the memory; it is freed when the last who looks at it does."""
        os.close(self._fd)
        self._memory = memoryview(b"")


def stamp(memory: memoryview) -> int:
    """Give the memory of a place a new stamp, before anything is written there; return it."""
    number = secrets.randbits(8 * _NUMBER_BYTES)
    memory[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, "little")
    return number


def stamped(memory: memoryview) -> int:
    """Return the stamp that the memory of a place has, after something was read there."""
    return int.from_bytes(memory[:_NUMBER_BYTES], "little")


def opened(place: Place) -> memoryview | None:
    """The bridge's end: return the whole region of a place, None if it is out of reach."""
    with suppress(OSError, ValueError):
        path = f"/proc/{place.pid}/fd/{place.fd}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME} "):
            return None  # a device may do something when it is opened
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                return None
            status = os.fstat(fd)
            nbytes = status.st_size
            # Root may open anybody's, and whoever made it could let a write to it fail.
            if status.st_uid != os.geteuid() or not _HEAD_BYTES < nbytes <= MAX_REGION_BYTES:
                return None
            memory = memoryview(mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)
        key = bytes(memory[:_KEY_BYTES]).hex()
        if secrets.compare_digest(key.encode(), place.key.encode()):
            return memory
    return None
