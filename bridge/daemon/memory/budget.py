"""How much memory all clients together may make the daemon hold besides records and their index.

Records and index take what `bridge.store.payloads.room_of` says; the rest of the memory limit is
here, for all clients together. With a large limit some more is taken, because the process itself is
small beside it: all in all 1.25 times the limit. Every client can have a little, however much the
others hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from bridge.store.payloads import room_of

# Of rows in the answer to one Fetch.
MAX_PAGE_BYTES = 8 << 20
_DEFAULT_LIMIT = 8 << 30
_MIN_BYTES = 1 << 20
_MIN_SHARE = 64 << 10
_MAX_MIN_SHARE = 1 << 20
# A client alone gets this part of the whole at most, so that those that come next find some.
_PARTS = 2
_PROCESS_BYTES = 96 << 20
_MAX_ANSWERS = 192 << 20
_MAX_LENT = 1 << 30
_MAX_TURN = 64 << 20
_ENGINE_MESSAGE_BYTES = 4 << 20
_ENGINES = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes.

    answers    of all answers that are not sent yet
    questions  of all questions that wait
    lent       of memory of clients that the daemon has touched and maps
    mapped     of the store's files that the daemon has read and maps
    turn       of messages that are received before they are stored
    """

    answers: int
    questions: int
    lent: int
    mapped: int
    turn: int

    @classmethod
    def of(cls, memory_limit: int) -> Self:
        """Return what a memory limit leaves; 0 is none, so that the default one counts."""
        limit = memory_limit or _DEFAULT_LIMIT
        transit = max(_MIN_BYTES, limit - room_of(limit))
        spare = max(0, limit // 4 - _PROCESS_BYTES)
        return cls(
            answers=min(transit * 3 // 8 + spare // 4, _MAX_ANSWERS),
            questions=transit // 8,
            lent=min(transit // 4 + spare // 4, _MAX_LENT),
            mapped=transit // 8 + spare // 4,
            turn=min(transit // 4 + spare // 8, _MAX_TURN),
        )

    @property
    def least_share(self) -> int:
        """What a client can have of ``answers`` also when others hold all of it."""
        return min(max(self.answers // 256, _MIN_SHARE), _MAX_MIN_SHARE)

    def share(self, clients: int) -> int:
        """Return what each of so many clients may have of ``answers``."""
        return max(self.answers // max(clients, _PARTS), self.least_share)

    @property
    def queued_messages(self) -> int:
        """How many messages ZeroMQ receives of a peer before the daemon takes them."""
        return min(max(self.lent // (_ENGINES * _ENGINE_MESSAGE_BYTES), 2), 16)
