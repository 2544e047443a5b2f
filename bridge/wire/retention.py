"""What a trainer or a person says about how long records are kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from bridge.errors import CorruptMessage
from bridge.wire.envelope import Envelope
from bridge.wire.fields import MAX_COUNT, Fields
from bridge.wire.message import HeaderOnly, frames_of

MAX_LEASE_S = 7 * 24 * 3600
MAX_STEP = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Step(HeaderOnly):
    """RL step ``step`` begins: what is told from here on belongs to it.

    It may be an earlier one than that before, when a trainer goes back to a checkpoint.
    """

    KIND: ClassVar[str] = "step"

    step: int

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"step": self.step}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        step = Fields(envelope.body).integer("step", 0, MAX_COUNT)
        if step > MAX_STEP:
            raise CorruptMessage(f"RL step {step} is over {MAX_STEP}; count steps from 0")
        return cls(step)


@dataclass(frozen=True, slots=True)
class Pin(HeaderOnly):
    """Keep these trajectories for ``lease_s`` seconds, whatever is collected; 0 lets them go."""

    KIND: ClassVar[str] = "pin"

    trajectories: tuple[str, ...]
    lease_s: int

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return {"trajectories": list(self.trajectories), "lease_s": self.lease_s}

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        return cls(fields.texts("trajectories"), fields.integer("lease_s", 0, MAX_LEASE_S))


@dataclass(frozen=True, slots=True)
class Policy:
    """What is collected; None collects nothing on that ground.

    `bridge.index.aging` says how far a step or version is behind.

    keep               RL steps kept, the current one among them
    max_version_diff   how many weight versions behind a row may be
    expire_s           seconds without news after which an unfinished trajectory is given up
    """

    keep: int | None = None
    max_version_diff: int | None = None
    expire_s: int | None = None


@dataclass(frozen=True, slots=True)
class Gc(HeaderOnly):
    """Collect by this policy now."""

    KIND: ClassVar[str] = "gc"

    policy: Policy

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return asdict(self.policy)

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        return cls(
            Policy(
                fields.optional_integer("keep", 1, MAX_COUNT),
                fields.optional_integer("max_version_diff", 0, MAX_COUNT),
                fields.optional_integer("expire_s", 0, MAX_COUNT),
            )
        )


@dataclass(frozen=True, slots=True)
class GcReply(HeaderOnly):
    """What was collected: trajectories, rows and store entries."""

    KIND: ClassVar[str] = "gc_reply"

    trajectories: int
    rows: int
    entries: int

    def body(self) -> dict[str, Any]:
        """Return the header fields."""
        return asdict(self)

    @classmethod
    def parse(cls, envelope: Envelope) -> Self:
        """Build from an intact envelope."""
        frames_of(envelope, 0)
        fields = Fields(envelope.body)
        counts = [
            fields.integer(name, 0, MAX_COUNT) for name in ("trajectories", "rows", "entries")
        ]
        return cls(*counts)
