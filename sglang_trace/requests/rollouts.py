"""One state for every request of SGLang, kept with the request itself.

Two requests can have one `rid` at a time: HTTP workers do not know each other's, and a client that
has disconnected may send its own again. So nothing here is found by `rid`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from bridge.transport.bridge_sharding import shard_of
from sglang_trace.requests.naming import SUFFIX_MARK
from sglang_trace.requests.trajectory_names import client_trajectory
from sglang_trace.requests.unrecorded import Reason, reason_at_start

# Of how many names the last rollout is remembered.
NAMES_KEPT = 1 << 16
# A conversation begins with one of these: NAME#1 begins anew, NAME#2 goes on.
FIRST_TURNS = frozenset({"", "0", "1"})
# Under this name a request keeps its state, through retraction and resumption.
_ATTRIBUTE = "trace_rollout"


@dataclass(frozen=True, eq=False)
class Rollout:
    """What one request computes.

    number      1, 2, ... in the order in which the engine first saw its requests
    trajectory  what it extends, None if it is not recorded
    reason      why it is not, None for the server's own
    continues   whether it goes on where the trajectory's last rollout ended; if not, its records
                replace those of the trajectory whole
    shard        the bridge that its rows go to (`bridge.transport.bridge_sharding`)
    """

    number: int
    trajectory: str | None
    reason: Reason | None = None
    continues: bool = False
    shard: int = 0


@dataclass
class _Last:
    """The last rollout of a name: its turns so far and the tokens that were sent of it."""

    turns: set[str] = field(default_factory=set)
    number: int = 0
    length: int = 0
    digest: bytes = b""


class Rollouts:
    """Makes the state of requests, and knows which request goes on where another one ended.

    A request continues its trajectory in one of two cases, and begins it anew in all others:

    - its prompt begins with all tokens that this engine last sent of the trajectory, sampled ones
      among them: a request that was aborted and is resumed, or the next turn;
    - its id has a turn behind '#' that is neither 0 nor 1, and that this engine has not seen since
      the trajectory began: the next turn, which may come from another engine.
    """

    def __init__(self, bridges: int = 1) -> None:
        self._bridges = bridges
        self._made = 0
        self._last: OrderedDict[str, _Last] = OrderedDict()

    def of(self, req: Any) -> Rollout:
        """Return the state of a request, made when it is first asked for."""
        found: Rollout | None = getattr(req, _ATTRIBUTE, None)
        if found is None:
            found = self._new(req)
            setattr(req, _ATTRIBUTE, found)
        return found

    def sent(self, rollout: Rollout, tokens: bytes, length: int, *, sampled: bool) -> None:
        """Note the tokens that were sent of a trajectory: `length` of int32."""
        last = self._last.get(rollout.trajectory or "")
        if last is not None and rollout.number >= last.number:
            last.number = rollout.number
            # A prompt of which nothing was sampled is begun again, not resumed.
            last.length, last.digest = (length, _digest(tokens)) if sampled else (0, b"")

    def _new(self, req: Any) -> Rollout:
        self._made += 1
        reason = reason_at_start(req)
        trajectory = None if reason is not None else client_trajectory(req.rid)
        if trajectory is None:
            return Rollout(self._made, None, reason)
        turn = req.rid.partition(SUFFIX_MARK)[2]
        continues = self._continues(trajectory, turn, req.origin_input_ids)
        last = self._last.pop(trajectory, None) if continues else None
        self._last[trajectory] = last = last or _Last()
        last.turns.add(turn)
        last.number = self._made
        if len(self._last) > NAMES_KEPT:
            self._last.popitem(last=False)
        shard = shard_of(trajectory, self._bridges)
        return Rollout(self._made, trajectory, None, continues, shard)

    def _continues(self, trajectory: str, turn: str, prompt: Sequence[int]) -> bool:
        last = self._last.get(trajectory)
        if (
            last is not None
            and 0 < last.length <= len(prompt)
            and _digest(array("i", prompt[: last.length]).tobytes()) == last.digest
        ):
            return True
        return turn not in FIRST_TURNS and (last is None or turn not in last.turns)


def _digest(tokens: bytes) -> bytes:
    return blake2b(tokens, digest_size=16).digest()
