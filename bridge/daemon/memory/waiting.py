"""Requests that wait until their client has read the earlier answers."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from bridge.daemon.memory.budget import Budget
from bridge.errors import TooManyRequests

_MAX_REQUESTS = 1024
_REQUEST_BYTES = 256
_MIN_BYTES = 16 << 10


@dataclass(slots=True)
class _Queue:
    requests: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0


class WaitingRequests:
    """One queue per client; the limit of a queue protects the other clients."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._queues: OrderedDict[bytes, _Queue] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        """Return the number of waiting clients."""
        return len(self._queues)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def put(self, peer: bytes, request: bytes) -> None:
        """Add the single frame of a request.

        Raises:
            TooManyRequests: the client's queue is full.
        """
        queue = self._queues.get(peer, _Queue())
        cost = len(request) + _REQUEST_BYTES
        share = max(self._budget.requests // (len(self._queues) + 1), _MIN_BYTES)
        over = self.nbytes + cost > self._budget.requests and queue.nbytes + cost > _MIN_BYTES
        if over or len(queue.requests) >= _MAX_REQUESTS or queue.nbytes + cost > share:
            raise TooManyRequests(
                f"{len(queue.requests)} requests of this client wait because it has not read the "
                "earlier answers, and there is no room for more; read answers first, or send "
                "fewer requests at a time"
            )
        queue.requests.append(request)
        queue.nbytes += cost
        self.nbytes += cost
        self._queues[peer] = queue

    def peers(self) -> list[bytes]:
        """Return the waiting clients in the order of their turns."""
        return list(self._queues)

    def take(self, peer: bytes) -> bytes:
        """Remove and return a client's oldest request; its next turn comes after all others."""
        queue = self._queues.pop(peer)
        request = queue.requests.popleft()
        cost = len(request) + _REQUEST_BYTES
        queue.nbytes -= cost
        self.nbytes -= cost
        if queue.requests:
            self._queues[peer] = queue
        return request

    def forget(self, peer: bytes) -> None:
        """Delete the requests of a disconnected client."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self.nbytes -= queue.nbytes
