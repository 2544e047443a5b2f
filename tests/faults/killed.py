"""kill -9 of the daemon, the engine and the trainer, each in the middle of its work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from bridge.client.client import TraceClient
from bridge.client.connection import Connection
from bridge.wire import Step
from tests.faults import engine, trainer
from tests.faults.engine import Stream
from tests.faults.expected import Expected
from tests.faults.fault import Fault, Repetition
from tests.faults.outcome import Outcome
from tests.faults.processes import (
    Bridge,
    asking,
    ended,
    lanes_in_memory,
    lanes_on_disk,
    lanes_that_keep_two_steps,
    running,
    wait_until,
)
from tests.faults.verifier import compare, verify

_SIDE_BY_SIDE = 6
_OLD_ROWS = 400
_TRAJECTORIES_OF_A_STREAM = 2
_RESTARTED = "the daemon is restarted"


def wait_for_some(repetition: Repetition, stream: Stream) -> None:
    """Wait until the repetition's share of the rows is acknowledged, at most two thirds."""
    least = repetition.rng.uniform(0.0, 0.66) * 2 * stream.expected.rows
    wait_until(lambda: stream.promises().count > least, repetition.end, "rows are acknowledged")


def finish(repetition: Repetition, process: BaseProcess, stream: Stream) -> Outcome:
    """Wait until the engine has said everything; report an engine that gave up."""
    ended(process, repetition.end, "the engine finishes")
    marks = stream.promises().marks
    return Outcome(reports=[] if "finished" in marks else [f"the engine ended: {marks}"])


def daemon_killed(repetition: Repetition) -> Outcome:
    """The engine goes on with the daemon that is started again."""
    with repetition.setting.bridge() as bridge:
        stream = repetition.stream(bridge.endpoint)
        with running(engine.run, stream) as process:
            wait_for_some(repetition, stream)
            bridge.kill()
            met = process.is_alive()
            bridge.restart()
            outcome = finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += verify(client, stream)
    return outcome + Outcome(met=met)


def daemon_and_engine_killed(repetition: Repetition) -> Outcome:
    """Nobody is left to send again: only what was acknowledged has to be there."""
    with repetition.setting.bridge() as bridge:
        stream = repetition.stream(bridge.endpoint)
        with running(engine.run, stream) as process:
            wait_for_some(repetition, stream)
            bridge.kill()
            met = process.is_alive()
        bridge.restart()
        with asking(bridge.endpoint, repetition.end) as client:
            outcome = verify(client, stream)
    return outcome + Outcome(met=met)


def daemon_killed_in_its_start(repetition: Repetition) -> Outcome:
    """Killed again while it starts, up to three times; the engine goes on with what starts last."""
    with repetition.setting.bridge() as bridge:
        stream = repetition.stream(bridge.endpoint)
        with running(engine.run, stream) as process:
            wait_for_some(repetition, stream)
            bridge.kill()
            met = process.is_alive()
            rng = repetition.rng
            for _ in range(int(rng.integers(1, 4))):
                bridge.start_and_kill(rng.uniform(0.1, 0.8))
            bridge.restart()
            outcome = finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += verify(client, stream)
    return outcome + Outcome(met=met)


def daemon_killed_while_it_collects(repetition: Repetition) -> Outcome:
    """An RL step begins, which lets go of what was recorded two steps ago; then kill -9."""
    with repetition.setting.bridge() as bridge:
        engine.fill(bridge.endpoint, Expected(f"old-{repetition.seed}", _OLD_ROWS))
        with asking(bridge.endpoint, repetition.end) as client:
            client.begin_step(client.stats().step + 1)
        stream = repetition.stream(bridge.endpoint)
        with running(engine.run, stream) as process:
            outcome = finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            step, held = client.stats().step, client.stats().trajectories
        with closing(Connection(bridge.endpoint)) as trainer_side:
            trainer_side.send(Step(step + 1))
            time.sleep(repetition.rng.uniform(0.0, 0.02))
            bridge.kill()
        bridge.restart()
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += verify(client, stream)
            client.begin_step(step + 1)
            outcome += replace(verify(client, stream), acknowledged=0)
    return outcome + Outcome(met=held > _TRAJECTORIES_OF_A_STREAM)


def daemon_in_memory_killed(repetition: Repetition) -> Outcome:
    """What it held is gone, and missing; what the engine says afterwards is held again."""
    with repetition.setting.bridge() as bridge:
        stream = repetition.stream(bridge.endpoint)
        with running(engine.run, stream) as process:
            wait_for_some(repetition, stream)
            bridge.kill()
            met = process.is_alive()
            with closing(engine.Journal(stream.journal)) as journal:
                journal.mark(_RESTARTED)
            bridge.restart()
            outcome = finish(repetition, process, stream)
        everything = stream.promises()
        kept = stream.promises(_RESTARTED)
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += verify(client, stream, _RESTARTED)
    outcome.acknowledged, outcome.forgotten = everything.count, everything.count - kept.count
    return outcome + Outcome(met=met)


def engine_killed(repetition: Repetition) -> Outcome:
    """Its acknowledged rows are there, and the next engine is served."""
    bridge: Bridge = repetition.setting
    stream = repetition.stream(bridge.endpoint)
    with running(engine.run, stream) as process:
        wait_for_some(repetition, stream)
        met = process.is_alive()
        process.kill()
        ended(process, repetition.end, "the engine is gone")
    with asking(bridge.endpoint, repetition.end) as client:
        return verify(client, stream) + Outcome(met=met)


def trainer_killed(repetition: Repetition) -> Outcome:
    """In the middle of a fetch of several pages; engines and other trainers are served on."""
    bridge, pages = repetition.setting
    reading = repetition.reading(bridge.endpoint, pages)
    stream = repetition.stream(bridge.endpoint, rows=64)
    with running(trainer.run, reading) as victim, running(engine.run, stream) as process:
        fetches = int(repetition.rng.integers(0, 3))
        wait_until(
            lambda: trainer.reported(reading)["asked"] > fetches, repetition.end, "it fetches"
        )
        time.sleep(repetition.rng.uniform(0.0, 0.02))
        done = trainer.reported(reading)
        victim.kill()
        ended(victim, repetition.end, "the trainer is gone")
        outcome = finish(repetition, process, stream)
    outcome += Outcome(
        compared=done["compared"], wrong=done["wrong"], met=done["asked"] > done["fetched"]
    )
    with asking(bridge.endpoint, repetition.end) as client:
        outcome += verify(client, stream)
        outcome += some_of(client, repetition, pages)
    return outcome


def some_of(client: TraceClient, repetition: Repetition, pages: Expected) -> Outcome:
    """Read a part of records that were acknowledged before all repetitions."""
    start = int(repetition.rng.integers(0, pages.rows - 100))
    records = client.fetch(pages.whole, start=start, stop=start + 100)
    compared, wrong = compare(records, pages)
    return Outcome(acknowledged=200, compared=compared, wrong=wrong, lost=200 - compared)


@contextmanager
def one_in_memory(_folder: Path) -> Iterator[Bridge]:
    """All repetitions share a daemon without a directory."""
    with closing(Bridge()) as bridge:
        yield bridge


@contextmanager
def one_on_disk(folder: Path) -> Iterator[Bridge]:
    """All repetitions share a daemon with a directory."""
    with closing(Bridge(folder / "store")) as bridge:
        yield bridge


@contextmanager
def pages_in_memory(_folder: Path) -> Iterator[tuple[Bridge, Expected]]:
    """A daemon without a directory that holds a trajectory of two pages."""
    with closing(Bridge()) as bridge:
        yield bridge, _filled(bridge)


@contextmanager
def pages_on_disk(folder: Path) -> Iterator[tuple[Bridge, Expected]]:
    """A daemon that holds a trajectory of two pages on disk, and little of it in memory."""
    with closing(Bridge(folder / "store", memory_limit="8MiB")) as bridge:
        yield bridge, _filled(bridge)


def _filled(bridge: Bridge) -> Expected:
    pages = Expected("pages", 8_000)
    engine.fill(bridge.endpoint, pages)
    return pages


FAULTS = (
    Fault(
        "kill -9 of the daemon, the engine goes on",
        "disk",
        daemon_killed,
        lanes_on_disk,
        _SIDE_BY_SIDE,
    ),
    Fault(
        "kill -9 of daemon and engine",
        "disk",
        daemon_and_engine_killed,
        lanes_on_disk,
        _SIDE_BY_SIDE,
    ),
    Fault(
        "kill -9 of the daemon in its start",
        "disk",
        daemon_killed_in_its_start,
        lanes_on_disk,
        _SIDE_BY_SIDE,
    ),
    Fault(
        "kill -9 of the daemon while it collects (--keep)",
        "disk",
        daemon_killed_while_it_collects,
        lanes_that_keep_two_steps,
        side_by_side=2,
    ),
    Fault(
        "kill -9 of the daemon, the engine goes on",
        "memory",
        daemon_in_memory_killed,
        lanes_in_memory,
        _SIDE_BY_SIDE,
        promise="rows that only the killed daemon held are missing, as stated for this tier",
    ),
    Fault("kill -9 of the engine", "disk", engine_killed, one_on_disk, _SIDE_BY_SIDE),
    Fault("kill -9 of the engine", "memory", engine_killed, one_in_memory, _SIDE_BY_SIDE),
    Fault("kill -9 of a trainer", "disk", trainer_killed, pages_on_disk, _SIDE_BY_SIDE),
    Fault("kill -9 of a trainer", "memory", trainer_killed, pages_in_memory, _SIDE_BY_SIDE),
)
