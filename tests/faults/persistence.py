"""Every call with which a store changes its files goes wrong, one at a time, in every work.

A first run without a failure lists the calls of each work. Then every call meets every failure, in
a daemon forked for it; `tests.faults.persisted` drives and checks.
"""

from __future__ import annotations

import atexit
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from tests.faults.failpoints import FAILURES, Failure, Plan, cannot_compile, loaded
from tests.faults.fault import Fault, Repetition
from tests.faults.outcome import Hang, Outcome
from tests.faults.persisted import WORKS, run, steps_of_works

_SIDE_BY_SIDE = 3
_ANSWER_S = 180.0
# Repetitions for every 100, so that each call of a work meets both ways of each failure.
_SHARES = {
    "the first start": 0.7,
    "appends": 1.5,
    "steps, --keep and gc": 2.6,
    "a stop and start": 0.7,
    "backup": 0.5,
    "compact": 0.7,
}
_fresh = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Job:
    """A run in ``folder``: call ``at`` of a work meets a failure."""

    folder: Path
    work: str
    at: int
    failure: Failure


class Worker:
    """A process with the failpoints loaded, which forks daemons and drives them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here, there = _fresh.Pipe()
        self._process = _fresh.Process(target=_work, args=(there, folder), daemon=True)
        self._process.start()
        there.close()
        self.steps: dict[str, list[str]] = self._answer()

    def do(self, job: Job) -> Outcome:
        """Run a job; raise Hang."""
        self._here.send(job)
        outcome: Outcome = self._answer()
        return outcome

    def _answer(self) -> object:
        if not self._here.poll(_ANSWER_S):
            raise Hang("a worker does not answer")
        answer = self._here.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process and the daemons that it forked."""
        with suppress(OSError):
            self._here.close()
        self._process.join(5.0)
        self._process.kill()
        self._process.join()


class Workers:
    """Workers for repetitions side by side."""

    def __init__(self, folder: Path) -> None:
        self._workers = [Worker(folder / f"worker{number}") for number in range(_SIDE_BY_SIDE)]
        self.steps = self._workers[0].steps
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """Give a worker; one that does not answer is ended, and so is every job given to it."""
        worker = self._free.get()
        try:
            yield worker
        except (Hang, EOFError, OSError):
            worker.close()
            raise
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all."""
        for worker in self._workers:
            worker.close()


@contextmanager
def workers(_folder: Path) -> Iterator[Workers]:
    """Give the workers, which take seconds to start, to one fault after the other."""
    yield _started()


@cache
def _started() -> Workers:
    """Start workers that live as long as this process; they list the calls of all works."""
    scratch = tempfile.TemporaryDirectory(prefix="failpoints-")
    atexit.register(scratch.cleanup)
    folder = Path(scratch.name)
    with loaded(folder):
        started = Workers(folder)
    atexit.register(started.close)
    return started


def failpoint(work: str, failures: tuple[Failure, Failure], repetition: Repetition) -> Outcome:
    """The number of the repetition says which call goes wrong in which of two ways."""
    setting: Workers = repetition.setting
    calls = len(setting.steps[work])
    number = repetition.number
    failure = failures[number // calls % len(failures)]
    at = number % calls
    with setting.worker() as worker:
        outcome = worker.do(Job(repetition.folder / "run", work, at, failure))
    if outcome.violated:
        outcome.reports.append(f"at {at}, {setting.steps[work][at]}, {failure}")
    return outcome


def _work(jobs: Connection, folder: Path) -> None:
    """Answer jobs until there are no more."""
    import bridge.client.reading  # noqa: F401 - torch, before a daemon is forked

    folder.mkdir()
    plan = Plan(folder / "plan")
    with suppress(EOFError):
        job = None
        while True:
            try:
                if job is None:
                    answer: object = steps_of_works(folder / "listed", plan)
                else:
                    answer = run(job.folder, plan, job.work, job.at, job.failure)
            except Exception as error:
                answer = error
            jobs.send(answer)
            job = jobs.recv()


FAULTS = tuple(
    Fault(
        f"{name} at every call: {work}",
        "disk",
        partial(failpoint, work, failures),
        workers,
        _SIDE_BY_SIDE,
        share=_SHARES[work],
        missing=cannot_compile,
    )
    for work in WORKS
    for name, failures in FAILURES.items()
)
