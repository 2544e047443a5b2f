"""Questions whose answers wait for their clients to read those before."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from bridge.daemon.memory.budget import Budget
from bridge.errors import TooManyRequests

_MAX_QUESTIONS = 1024
_QUESTION_BYTES = 256
_MIN_BYTES = 16 << 10


@dataclass(slots=True)
class _Queue:
    questions: deque[bytes] = field(default_factory=deque)
    nbytes: int = 0


class WaitingQuestions:
    """One queue a client, each bounded by its share, so that no client pushes out another's."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._queues: OrderedDict[bytes, _Queue] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        """Return how many clients wait."""
        return len(self._queues)

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._queues

    def put(self, peer: bytes, question: bytes) -> None:
        """Keep the one frame of a question.

        Raises:
            TooManyRequests: this client's questions that wait are as many as it may have.
        """
        queue = self._queues.get(peer, _Queue())
        cost = len(question) + _QUESTION_BYTES
        share = max(self._budget.questions // (len(self._queues) + 1), _MIN_BYTES)
        over = self.nbytes + cost > self._budget.questions and queue.nbytes + cost > _MIN_BYTES
        if over or len(queue.questions) >= _MAX_QUESTIONS or queue.nbytes + cost > share:
            raise TooManyRequests(
                f"{len(queue.questions)} questions of this client wait because it has not read the "
                "answers before them, and there is no room for more; read answers first, or ask "
                "fewer questions at a time"
            )
        queue.questions.append(question)
        queue.nbytes += cost
        self.nbytes += cost
        self._queues[peer] = queue

    def peers(self) -> list[bytes]:
        """Return the clients that wait, the one whose turn is next first."""
        return list(self._queues)

    def take(self, peer: bytes) -> bytes:
        """Return a client's oldest question; its next turn comes after those of all others."""
        queue = self._queues.pop(peer)
        question = queue.questions.popleft()
        cost = len(question) + _QUESTION_BYTES
        queue.nbytes -= cost
        self.nbytes -= cost
        if queue.questions:
            self._queues[peer] = queue
        return question

    def forget(self, peer: bytes) -> None:
        """Let go of the questions of a client that is gone."""
        queue = self._queues.pop(peer, None)
        if queue is not None:
            self.nbytes -= queue.nbytes
