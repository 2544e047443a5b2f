"""Failpoints and the history checker see what they should: daemons broken on purpose are caught."""

from __future__ import annotations

import errno
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.faults.failpoints import Action, Failure, Plan, attach, cannot_compile, loaded
from tests.faults.fault import Fault
from tests.faults.outcome import Outcome
from tests.faults.persisted import WORKS, Session, run
from tests.faults.persistence import Workers, failpoint
from tests.faults.repeat import repeat

pytestmark = pytest.mark.skipif(bool(cannot_compile()), reason=cannot_compile())

_KILLED = Failure(Action.KILL)
_FULL = Failure(Action.FAIL, errno.ENOSPC, lasting=True)
_NEVER = 1 << 40
_ANSWER_S = 120.0
_fresh = multiprocessing.get_context("spawn")


def _asked(pipe: Connection) -> None:
    """Answer function calls until there are no more."""
    import bridge.client.reading  # noqa: F401 - torch, before a daemon is forked

    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*arguments))
        except Exception as error:
            pipe.send(error)


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Outcome]]:
    """Call a function in a process that has the failpoints loaded."""
    here, there = _fresh.Pipe()
    with loaded(tmp_path_factory.mktemp("library")):
        process = _fresh.Process(target=_asked, args=(there,), daemon=True)
        process.start()

    def called(function: Callable[..., Outcome], *arguments: object) -> Outcome:
        here.send((function, arguments))
        assert here.poll(_ANSWER_S)
        answer = here.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    yield called
    here.close()
    process.kill()
    process.join()


def sabotaged(
    folder: Path,
    work: str,
    sabotage: Callable[[], None],
    at: int = _NEVER,
    failure: Failure = _KILLED,
) -> Outcome:
    folder.mkdir()
    return run(folder / "run", Plan(folder / "plan"), work, at, failure, sabotage)


def forgets_rows() -> None:
    """Acknowledge entries that are not written."""
    from bridge.store.disk.lmdb_store import DiskStore

    put, count = DiskStore._put, [0]

    def some(self: DiskStore, txn: object, number: int, entry: object) -> None:
        count[0] += 1
        if count[0] % 7:
            put(self, txn, number, entry)

    DiskStore._put = some


def writes_other_bytes() -> None:
    """Store rows with a byte that was not sent, under a checksum that fits."""
    from dataclasses import replace

    from bridge.store.disk.lmdb_store import DiskStore

    put = DiskStore._put

    def other(self: DiskStore, txn: object, number: int, entry: object) -> None:
        if entry.payload is not None:
            payload = bytearray(entry.payload)
            payload[0] ^= 1
            entry = replace(entry, payload=bytes(payload))
        put(self, txn, number, entry)

    DiskStore._put = other


def refuses_what_it_made() -> None:
    """Serve a store only once."""
    import bridge.daemon.run
    from bridge.errors import TraceError

    store = bridge.serving._store

    def once(limits: object) -> object:
        if (limits.directory / "data.mdb").exists():
            raise TraceError("there is a store")
        return store(limits)

    bridge.serving._store = once


def lets_pins_go() -> None:
    """Acknowledge pins and hold nothing."""
    from bridge.daemon.retention import Retention

    Retention.pin = lambda self, asked: None


def ends_when_told_of_a_step() -> None:
    """End at what the daemon handles."""
    from bridge.index.catalog import Catalog

    apply = Catalog.apply

    def ending(self: Catalog, told: object, seq: int, number: int) -> None:
        if told.KIND == "step":
            raise RuntimeError("a step")
        apply(self, told, seq, number)

    Catalog.apply = ending


def nothing() -> None:
    """Leave the daemon as it is."""


def test_works_that_meet_no_failure_are_no_violation(
    call: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = call(sabotaged, tmp_path / "run", list(WORKS)[-1], nothing)
    assert not outcome.violated, outcome
    assert outcome.compared > outcome.acknowledged > 0
    assert not outcome.met


@pytest.mark.parametrize(
    ("sabotage", "seen"),
    [
        (forgets_rows, lambda outcome: outcome.lost),
        (writes_other_bytes, lambda outcome: outcome.wrong),
        (refuses_what_it_made, lambda outcome: outcome.refused),
        (lets_pins_go, lambda outcome: outcome.lost),
        (ends_when_told_of_a_step, lambda outcome: outcome.reports),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_broken_daemon_is_caught(
    call: Callable[..., Outcome],
    tmp_path: Path,
    sabotage: Callable[[], None],
    seen: Callable[[Outcome], object],
) -> None:
    outcome = call(sabotaged, tmp_path / "run", "steps, --keep and gc", sabotage)
    assert outcome.violated
    assert seen(outcome), outcome


def test_a_daemon_is_killed_at_the_call_that_is_named(
    call: Callable[..., Outcome], tmp_path: Path
) -> None:
    outcome = call(sabotaged, tmp_path / "run", "appends", nothing, 5)
    assert outcome.met == 1
    assert not outcome.violated, outcome


@pytest.mark.parametrize("at", range(6))
def test_a_file_system_that_took_no_writes_for_a_while_takes_them_again(
    call: Callable[..., Outcome], tmp_path: Path, at: int
) -> None:
    refused = Failure(Action.FAIL, errno.EROFS, lasting=True)
    outcome = call(sabotaged, tmp_path / "run", "appends", nothing, at, refused)
    assert outcome.met == 1
    assert not outcome.violated, outcome


def _calls(folder: Path, failure: Failure) -> tuple[list[str], list[str]]:
    """Write, rename and delete files; return (calls seen, what each came to)."""
    import os

    inside = folder / "inside"
    inside.mkdir(parents=True)
    plan = Plan(folder / "plan")
    attach(plan.file, inside)
    came_to = []

    def attempt(work: Callable[[], object]) -> None:
        try:
            came_to.append(str(work()))
        except OSError as error:
            came_to.append(errno.errorcode[error.errno or 0])

    outside = os.open(folder / "outside", os.O_CREAT | os.O_WRONLY)
    file = os.open(inside / "a", os.O_CREAT | os.O_WRONLY)
    plan.arm(1, failure)
    attempt(lambda: os.write(file, b"1234"))
    attempt(lambda: os.write(outside, b"1234"))
    attempt(lambda: os.write(file, b"1234"))
    attempt(lambda: os.pwrite(file, b"1234", 0))
    attempt(lambda: os.writev(file, [b"12", b"34"]))
    attempt(lambda: os.fsync(file))
    attempt(lambda: os.rename(inside / "a", inside / "b"))
    attempt(lambda: os.posix_fallocate(file, 0, 8))
    attempt(lambda: os.unlink(inside / "b"))
    return plan.steps, came_to


@pytest.mark.parametrize(
    ("failure", "came_to"),
    [
        (Failure(Action.FAIL, errno.EIO), ["EIO", "4", "4", "None", "None", "None", "None"]),
        (_FULL, ["ENOSPC"] * 7),
        (Failure(Action.SHORT, errno.ENOSPC, lasting=True), ["2", *["ENOSPC"] * 6]),
    ],
)
def test_calls_below_the_folder_meet_the_failure_from_the_chosen_one_on(
    call: Callable[..., Outcome], tmp_path: Path, failure: Failure, came_to: list[str]
) -> None:
    steps, seen = call(_calls, tmp_path / "calls", failure)
    assert [step.split()[0] for step in steps] == [
        *("write", "write", "pwrite", "writev", "fsync", "rename"),
        *(steps[6].split()[0], "unlink"),
    ]
    assert steps[5] == "rename a"
    assert seen == ["4", "4", *came_to]


def test_a_session_reports_a_daemon_that_ends_by_itself(tmp_path: Path) -> None:
    session = Session(tmp_path, Plan(tmp_path / "plan"))
    session._note_end(70, "is served")
    session.faulty = _FULL
    session._note_end(1, "is opened")
    session._note_end(1, "is served")
    assert session.outcome.reports == [
        "a process ends with a traceback while the store is served",
        "a process ends with status 1 while the store is served",
    ]


def test_workers_that_have_ended_are_reported_and_nothing_waits_for_them(tmp_path: Path) -> None:
    with loaded(tmp_path):
        workers = Workers(tmp_path)
    try:
        for worker in workers._workers:
            worker._process.kill()
        fault = Fault("a fault", "disk", partial(failpoint, "appends", (_FULL, _FULL)))
        fault = replace(fault, setting=lambda _: nullcontext(workers), side_by_side=4)
        row = repeat(fault, [*range(8)], scratch=tmp_path)
        assert len(row.violations) == 8
    finally:
        workers.close()
