"""Messages about how long records are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from bridge.errors import CorruptMessage
from bridge.wire.fields import Count, Names
from bridge.wire.message import Message

MAX_LEASE_S = 7 * 24 * 3600
MAX_STEP = (1 << 31) - 1


class Step(Message, frozen=True):
    """RL step ``step`` begins: later records belong to it.

    It may be smaller than the one before, when a trainer goes back to a checkpoint.
    """

    KIND: ClassVar[str] = "step"

    step: Count

    def check(self) -> None:
        """Raise CorruptMessage for a step that is out of range."""
        if self.step > MAX_STEP:
            raise CorruptMessage(f"RL step {self.step} is over {MAX_STEP}; count steps from 0")


class Pin(Message, frozen=True):
    """Protect these trajectories from deletion for ``lease_s`` seconds; 0 ends the protection."""

    KIND: ClassVar[str] = "pin"

    trajectories: Names
    lease_s: Annotated[int, Meta(ge=0, le=MAX_LEASE_S)]


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits beyond which records are deleted; None is no limit.

    `bridge.index.aging` defines how far a step or version is behind.

    keep               RL steps kept, the current one among them
    max_version_diff   how many weight versions behind a row may be
    expire_s           seconds without news after which an unfinished trajectory expires
    """

    keep: Annotated[int, Meta(ge=1, le=1 << 62)] | None = None
    max_version_diff: Count | None = None
    expire_s: Count | None = None


class Gc(Message, frozen=True):
    """Delete by this policy now."""

    KIND: ClassVar[str] = "gc"

    policy: Policy


class GcReply(Message, frozen=True):
    """Counts of deleted trajectories, rows and store entries."""

    KIND: ClassVar[str] = "gc_reply"

    trajectories: Count
    rows: Count
    entries: Count
