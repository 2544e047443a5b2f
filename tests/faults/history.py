"""A history of what a bridge was sent and acknowledged, and what it may have collected since.

The checker fetches everything after each restart and compares: an acknowledged row, state, pin,
step or digest is there unless a policy that was sent may have given it up; a row that is there is
the one that was recorded, acknowledged or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bridge.client.client import TraceClient
from bridge.errors import UnknownTrajectory
from bridge.layout import Part
from bridge.wire import (
    Gc,
    Hello,
    Message,
    Pin,
    Rows,
    Step,
    Trajectory,
    TrajectoryState,
    WeightDigests,
)
from tests.faults.expected import LAYOUT, Expected
from tests.faults.outcome import Outcome
from tests.faults.verifier import compare, part_of

_MOST_ROWS = 1 << 16


@dataclass(slots=True)
class Group:
    """A trajectory and its rows [first, stop), all sent within one RL step.

    Attributes:
        step: the earliest step to which the bridge may count it: the last one acknowledged when it
            was first sent. A step that was sent and not acknowledged may never have begun.
        pinned: a pin of it was acknowledged.
        states: (sent state, acknowledged), in order.
        held: parts whose rows are acknowledged.
    """

    first: int
    stop: int
    step: int
    pinned: bool = False
    states: list[tuple[TrajectoryState, bool]] = field(default_factory=list)
    held: set[Part] = field(default_factory=set)

    @property
    def is_known(self) -> bool:
        """Whether any of its trajectory messages is acknowledged."""
        return any(acknowledged for _, acknowledged in self.states)

    def may_be(self) -> set[TrajectoryState]:
        """Return the last acknowledged state and those that were sent after it."""
        known = [at for at, (_, acknowledged) in enumerate(self.states) if acknowledged]
        return {state for state, _ in self.states[known[-1] if known else 0 :]}


class History:
    """What one engine, ``expected``, and one trainer sent to a bridge that keeps ``keep`` steps."""

    def __init__(self, expected: Expected, keep: int) -> None:
        self.expected = expected
        self.groups: dict[str, Group] = {}
        self.step = self.acknowledged_step = 0
        self._keep = keep
        self._oldest_kept = 0
        self._digests: dict[str, tuple[dict[str, str], int]] = {}
        self._digests_held: set[str] = set()

    # --- what happens

    def group(self, name: str, rows: int) -> Group:
        """Plan the next trajectory, of so many rows of one weight version."""
        first = max((group.stop for group in self.groups.values()), default=0)
        end = self.expected.end_of_version(first)
        first = first if first + rows <= end else end
        self.groups[name] = Group(first, first + rows, self.acknowledged_step)
        return self.groups[name]

    def send(self, message: Message) -> None:
        """Note that a message is sent for the first time: what it gives up may be gone."""
        match message:
            case Trajectory():
                self.groups[message.trajectory].states.append((message.state, False))
            case Step():
                self.step = max(self.step, message.step)
                self._give_up(self._keep)
            case Gc(policy=policy) if policy.keep is not None:
                self._give_up(policy.keep)
            case Pin(lease_s=0):
                for name in message.trajectories:
                    self.groups[name].pinned = False
            case WeightDigests():
                told = dict(message.digests), self.acknowledged_step
                self._digests[message.weight_version] = told
            case _:
                pass

    def acknowledge(self, message: Message) -> None:
        """Note that the bridge holds a message."""
        match message:
            case Trajectory():
                group = self.groups[message.trajectory]
                at = [state for state, _ in group.states].index(message.state)
                group.states[at] = (message.state, True)
            case Rows(header=block):
                for group in self.groups.values():
                    if group.first <= int(block.rows[0]) < group.stop:
                        group.held.add(block.part)
            case Step():
                self.acknowledged_step = max(self.acknowledged_step, message.step)
            case Pin(lease_s=lease_s) if lease_s:
                for name in message.trajectories:
                    # One that is given up before the pin comes is not brought back by it.
                    self.groups[name].pinned |= self._is_kept(self.groups[name])
            case WeightDigests():
                self._digests_held.add(message.weight_version)
            case _:
                pass

    # --- what must hold

    def verify(self, client: TraceClient) -> Outcome:
        """Read everything back."""
        outcome = Outcome()
        for name, group in self.groups.items():
            outcome += self._verify_group(client, name, group)
        outcome.reports += self._misreported(client)
        return outcome

    def _verify_group(self, client: TraceClient, name: str, group: Group) -> Outcome:
        must_be_there = group.pinned or self._is_kept(group)
        rows = group.stop - group.first
        outcome = Outcome(acknowledged=rows * len(group.held) if must_be_there else 0)
        try:
            records = client.fetch(name)
        except UnknownTrajectory:
            if must_be_there and group.is_known:
                outcome.lost += max(1, rows * len(group.held))
                outcome.reports.append(f"{name} was acknowledged and is not known")
            return outcome
        outcome.compared, outcome.wrong = compare(records, self.expected, group.first)
        if not must_be_there or not group.is_known:
            return outcome
        for part in group.held:
            valid_T, _ = part_of(records, part)
            missing = rows - int(valid_T.sum())
            outcome.lost += missing
            if missing:
                outcome.reports.append(f"{missing} acknowledged {part} rows of {name} are missing")
        if records.state not in group.may_be():
            outcome.reports.append(f"{name} is {records.state}, not in {sorted(group.may_be())}")
        return outcome

    def _misreported(self, client: TraceClient) -> list[str]:
        reports = []
        step = client.stats().step
        if not self.acknowledged_step <= step <= self.step:
            reports.append(
                f"the step is {step}; {self.acknowledged_step} was acknowledged, {self.step} sent"
            )
        for version, (digests, since) in self._digests.items():
            held = client.digests(version)
            kept = version in self._digests_held and since >= self._oldest_kept
            if held != digests and (held or kept):
                reports.append(f"the digests of {version} are {held}, not {digests}")
        return reports

    def _give_up(self, keep: int) -> None:
        self._oldest_kept = max(self._oldest_kept, self.step - keep + 1)

    def _is_kept(self, group: Group) -> bool:
        return group.step >= self._oldest_kept


def expected_engine(engine_id: str) -> Expected:
    """Return an engine with more rows than any history has."""
    return Expected(engine_id, _MOST_ROWS)


def hello_of(expected: Expected) -> Hello:
    """Return the engine's introduction."""
    return Hello(expected.engine_id, LAYOUT)


def rows_of(expected: Expected, part: Part, group: Group) -> Rows:
    """Return the message with a group's rows."""
    payload = expected.payload(part, group.first, group.stop)
    rows = np.arange(group.first, group.stop)
    return Rows.of(expected.engine_id, part, rows, payload, expected.version(group.first))


def told_of(expected: Expected, name: str, group: Group, state: TrajectoryState) -> Trajectory:
    """Return the message that tells a group's trajectory."""
    tokens = expected.tokens(group.stop)[group.first :]
    rows = np.arange(group.first, group.stop)
    return Trajectory(expected.engine_id, name, 0, tokens, rows, state)
