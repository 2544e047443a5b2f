"""One run of a bridge's works on its store, one of which meets a failure, checked to the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import zmq

from bridge.client.client import TraceClient
from bridge.layout import Part
from bridge.store.directory import DATA_FILE
from bridge.store.disk import upkeep
from bridge.wire import (
    Error,
    Gc,
    Message,
    Pin,
    Policy,
    Step,
    TrajectoryState,
    WeightDigests,
    decode,
    encode,
)
from tests.faults.failpoints import Action, Failure, Plan
from tests.faults.forked_daemon import BROKEN, REFUSED, Forked, Work, daemon, endpoint_of
from tests.faults.history import (
    Group,
    History,
    expected_engine,
    hello_of,
    rows_of,
    told_of,
)
from tests.faults.outcome import Hang, Outcome

KEEP = 2
_DISK_LIMIT = "16MiB"
_DEADLINE_S = 60.0
_LOOK_MS = 20
_SIZES = (1, 24, 3, 60)  # rows of a trajectory: values within a page of the file, and over several


@dataclass(slots=True)
class Session:
    """A bridge over ``folder``/files/store, an engine and a trainer, all driven from here.

    Attributes:
        plan: of the failpoints of the daemon.
        sabotage: what is done to the daemon's code before it serves; to test the checker.
        faulty: a failure is armed, so that refusals and ends are no violation.
        outcome: what was seen so far.
    """

    folder: Path
    plan: Plan
    sabotage: Work = lambda: None
    faulty: Failure | None = None
    outcome: Outcome = field(default_factory=Outcome)
    history: History = field(default_factory=lambda: History(expected_engine("engine"), KEEP))
    end: float = field(default_factory=lambda: time.monotonic() + _DEADLINE_S)
    _daemon: Forked | None = None
    _endpoint: str = ""
    _context: zmq.Context[zmq.Socket[bytes]] | None = None
    _seq: int = 0
    _copies: int = 0
    _refused: list[tuple[int, Message]] = field(default_factory=list)

    @property
    def files(self) -> Path:
        """Below it failpoints count."""
        return self.folder / "files"

    @property
    def _store(self) -> Path:
        return self.files / "store"

    # --- works

    def start(self) -> bool:
        """Start the daemon; return whether it serves."""
        work = daemon(self._store, KEEP, _DISK_LIMIT, self.sabotage)
        self._daemon = Forked(self.plan, self.files, work)
        self._endpoint = endpoint_of(self._daemon.line(self.end))
        if not self._endpoint:
            self._note_end(self._daemon.wait(self.end), "is opened")
            self.close()
        return bool(self._endpoint)

    def first_start(self) -> None:
        """Make the store."""
        self.start()

    def append(self) -> None:
        """Introduce an engine and tell three trajectories."""
        expected = self.history.expected
        self.tell(hello_of(expected))
        self.tell(WeightDigests(expected.engine_id, "v0", {"w": "0" * 32}))
        for rows in _SIZES[1:]:
            self.tell_group(rows)

    def collect(self) -> None:
        """Begin steps and collect, with two pinned trajectories, one of which stays so."""
        pinned = tuple(islice(self.history.groups, 2))
        self.ask(Pin(pinned, 3600))
        for rows in _SIZES[:2]:
            self.ask(Step(self.history.step + 1))
            self.tell_group(rows)
        self.ask(Gc(Policy(keep=1)))
        self.tell_group(_SIZES[0])
        self.ask(Pin(pinned[:1], 0))
        self.ask(Step(self.history.step + 1))

    def stop_and_start(self) -> None:
        """Stop as a person does and serve the store again."""
        if self._daemon is not None:
            self._daemon.kill(signal.SIGTERM)
            status = self._daemon.wait(self.end)
            if status:
                self._note_end(status, "is closed")
            self.close()
        self.start()

    def back_up(self) -> None:
        """Copy the store while it is served; a copy that can be served is whole."""
        copy = self.files / f"copy{self._copies}"
        self._copies += 1
        done = self._upkeep(lambda: upkeep.back_up(self._store, copy, _unwatched), "is copied")
        armed, self.faulty = self.faulty, None
        self.plan.disarm()
        if (copy / DATA_FILE).exists():
            self._verify_copy(copy)
        elif done:
            self.outcome.reports.append("a copy that is done is not there")
        if not done:
            self.outcome.refused += armed is None
            if armed is not None:
                self.back_up()

    def compact(self) -> None:
        """Stop the daemon, compact the store and serve it again."""
        if self._daemon is not None:
            self._daemon.kill(signal.SIGTERM)
            self._daemon.wait(self.end)
        self.close()
        self._upkeep(lambda: upkeep.compact(self._store, _unwatched), "is compacted")
        self.start()

    def _upkeep(self, work: Work, doing: str) -> bool:
        """Do work on the store in a process of its own; return whether it was done."""
        process = Forked(self.plan, self.files, work)
        try:
            status = process.wait(self.end)
        finally:
            process.close()
        if status:
            self._note_end(status, doing)
        return not status

    def _verify_copy(self, copy: Path) -> None:
        """Serve a copy for a moment and read everything back."""
        served = Forked(self.plan, self.files, daemon(copy, KEEP, _DISK_LIMIT, self.sabotage))
        try:
            endpoint = endpoint_of(served.line(self.end))
            if endpoint:
                self.verify(endpoint)
            else:
                self.outcome.refused += 1
        finally:
            served.close()

    # --- what follows a failure

    def settle(self) -> None:
        """Let the fault be over: all is there, before and after kill -9, and work goes on."""
        if self._endpoint and not self._has_ended():
            self.verify()
        self.faulty = None
        self.plan.disarm()
        if not self._serves():
            return
        self._send_refused()
        self.verify()
        self.close()
        if not self._serves():
            return
        self.verify()
        self.append()
        self.collect()
        self._send_refused()
        self.verify()
        self.stop_and_start()
        if self._serves():
            self.verify()

    def verify(self, endpoint: str = "") -> None:
        """Read everything back; the rows acknowledged count as of the last time."""
        at, left_s = endpoint or self._endpoint, max(0.1, self.end - time.monotonic())
        with TraceClient(at, timeout_s=left_s) as client:
            seen = self.history.verify(client)
        self.outcome.acknowledged = 0
        self.outcome += seen

    def _serves(self) -> bool:
        """Start the daemon if it does not run; count a store that it refuses for good."""
        if self._daemon is not None and not self._has_ended():
            return True
        self.close()
        if self.start():
            return True
        self.outcome.refused += 1
        return False

    def _send_refused(self) -> None:
        """Send again what was refused or not answered, as an engine does."""
        waiting, self._refused = self._refused, []
        for seq, message in waiting:
            self._send(seq, message)
        if self._refused:
            self.outcome.refused += 1
            kinds = sorted({message.KIND for _, message in self._refused})
            self.outcome.reports.append(f"after the fault {', '.join(kinds)} messages are refused")

    def close(self) -> None:
        """End the daemon as kill -9 does."""
        if self._context is not None:
            self._context.destroy(linger=0)
        if self._daemon is not None:
            self._daemon.close()
        self._context = self._daemon = None
        self._endpoint = ""

    # --- messages

    def tell_group(self, rows: int) -> None:
        """Send the rows of a new trajectory and tell it twice."""
        name = f"trajectory-{len(self.history.groups)}"
        group = self.history.group(name, rows)
        self._tell_state(name, group, TrajectoryState.OPEN)
        for part in Part:
            self.tell(rows_of(self.history.expected, part, group))
        self._tell_state(name, group, TrajectoryState.FINISHED)

    def _tell_state(self, name: str, group: Group, state: TrajectoryState) -> None:
        self.tell(told_of(self.history.expected, name, group, state))

    def tell(self, message: Message) -> None:
        """Send an engine's message, which is kept until it is acknowledged."""
        self._send(self._next_seq(), message)

    def _send(self, seq: int, message: Message) -> None:
        if not self._exchange(seq, message):
            self._refused.append((seq, message))

    def ask(self, message: Message) -> None:
        """Send a trainer's message, which is not sent again."""
        done = self._exchange(self._next_seq(), message)
        if not done and self.faulty is None:
            self.outcome.reports.append(f"a {message.KIND} message is refused without a fault")

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _exchange(self, seq: int, message: Message) -> bool:
        """Return whether the bridge did it; a daemon that a failpoint killed is started again."""
        self.history.send(message)
        reply = self._reply(seq, message)
        if reply is None or isinstance(reply, Error):
            return False
        self.history.acknowledge(message)
        return True

    def _reply(self, seq: int, message: Message) -> Message | None:
        """Return the reply, None if the daemon ends before."""
        if self._daemon is None:
            return None
        with self._socket() as socket:
            socket.send_multipart(encode(message, seq))
            while not socket.poll(_LOOK_MS):
                if self._has_ended():
                    return self._revived()
                if time.monotonic() > self.end:
                    raise Hang(f"a {message.KIND} message is not answered")
            return decode(socket.recv_multipart())[0]

    def _socket(self) -> zmq.Socket[bytes]:
        if self._context is None:
            self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._endpoint)
        return socket

    def _has_ended(self) -> bool:
        return self._daemon is None or self._daemon.has_ended()

    def _revived(self) -> None:
        """Note why the daemon ended and start it again, so that the work goes on."""
        assert self._daemon is not None
        self._note_end(self._daemon.wait(self.end), "is served")
        self.close()
        self.plan.disarm()
        self._serves()

    def _note_end(self, status: int, doing: str) -> None:
        """Report an end that no failpoint made and that is not a sentence at the start."""
        killed = self.faulty is not None and self.faulty.action in (
            Action.KILL,
            Action.KILL_WITHIN,
        )
        if killed and status == -signal.SIGKILL:
            return
        if self.faulty is not None and status == REFUSED and doing != "is served":
            return
        told = "with a traceback" if status == BROKEN else f"with status {status}"
        self.outcome.reports.append(f"a process ends {told} while the store {doing}")


def _unwatched(_done: int, _of: int) -> None:
    """Show no progress."""


WORKS: dict[str, Callable[[Session], None]] = {
    "the first start": Session.first_start,
    "appends": Session.append,
    "steps, --keep and gc": Session.collect,
    "a stop and start": Session.stop_and_start,
    "backup": Session.back_up,
    "compact": Session.compact,
}


def steps_of_works(folder: Path, plan: Plan) -> dict[str, list[str]]:
    """Run all works without a failure; return the calls that each makes."""
    session, steps = _session(folder, plan), {}
    try:
        for name, work in WORKS.items():
            plan.clear()
            work(session)
            steps[name] = plan.steps
        plan.clear()
        session.settle()
    finally:
        session.close()
    if session.outcome.violated:
        raise AssertionError(f"without a failure: {session.outcome}")
    return steps


def run(
    folder: Path, plan: Plan, work: str, at: int, failure: Failure, sabotage: Work = lambda: None
) -> Outcome:
    """Run all works up to ``work``, whose call ``at`` meets the failure; check to the end."""
    session = _session(folder, plan, sabotage)
    plan.clear()
    try:
        for name, do in WORKS.items():
            if name == work:
                plan.arm(at, failure)
                session.faulty = failure
            do(session)
            if name == work:
                break
        session.outcome.met = int(plan.met > 0)
        session.settle()
    except Hang as hang:
        session.outcome.hangs += 1
        session.outcome.reports.append(f"not in time: {hang}")
    finally:
        session.close()
    return session.outcome


def _session(folder: Path, plan: Plan, sabotage: Work = lambda: None) -> Session:
    session = Session(folder, plan, sabotage)
    session.files.mkdir(parents=True)
    return session
