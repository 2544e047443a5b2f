"""Memory limits for data in flight of all clients together.

Records and index may take `bridge.store.payloads.room_of` of the memory limit; this module divides
the rest. With a large limit the daemon takes some more, because the process itself is small: in all
1.25 times the limit. Every client gets a minimum, whatever the others use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bridge.store.payloads import room_of

# Bytes of rows in the answer to one Fetch.
MAX_PAGE_BYTES = 8 << 20
_DEFAULT_LIMIT = 8 << 30
_MIN_BYTES = 1 << 20
_MIN_SHARE = 64 << 10
_MAX_MIN_SHARE = 1 << 20
# One client gets at most 1/2, so that the next clients find some.
_PARTS = 2
_PROCESS_BYTES = 96 << 20
_MAX_ANSWERS = 192 << 20
_MAX_SHM = 1 << 30
_MAX_BATCH = 64 << 20
_ENGINE_MESSAGE_BYTES = 4 << 20
_ENGINES = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum bytes.

    answers    answers that ZeroMQ has not sent yet
    requests   requests that wait
    shm        pages of clients' shared memory that the daemon has touched
    mapped     pages of the store's files that the daemon has read
    batch      messages that the daemon receives before it stores them
    """

    answers: int
    requests: int
    shm: int
    mapped: int
    batch: int

    @classmethod
    def of(cls, memory_limit: int) -> Self:
        """Divide the rest of a memory limit; 0 means no limit, so the default limit counts."""
        limit = memory_limit or _DEFAULT_LIMIT
        transit = max(_MIN_BYTES, limit - room_of(limit))
        spare = max(0, limit // 4 - _PROCESS_BYTES)
        return cls(
            answers=min(transit * 3 // 8 + spare // 4, _MAX_ANSWERS),
            requests=transit // 8,
            shm=min(transit // 4 + spare // 4, _MAX_SHM),
            mapped=transit // 8 + spare // 4,
            batch=min(transit // 4 + spare // 8, _MAX_BATCH),
        )

    @property
    def min_share(self) -> int:
        """Bytes of ``answers`` that every client gets, whatever the others use."""
        return min(max(self.answers // 256, _MIN_SHARE), _MAX_MIN_SHARE)

    def share(self, clients: int) -> int:
        """Return the bytes of ``answers`` that each of ``clients`` may use."""
        return max(self.answers // max(clients, _PARTS), self.min_share)

    @property
    def queued_messages(self) -> int:
        """Number of messages that ZeroMQ queues per peer before the daemon receives them."""
        return min(max(self.shm // (_ENGINES * _ENGINE_MESSAGE_BYTES), 2), 16)
