"""SIGSTOP of the daemon, the engine and the trainer for a while, in the middle of their work.

A stopped process keeps its connections open and takes nothing: its peers see no error at all.
"""

from __future__ import annotations

import time

from bridge.client.client import TraceClient
from bridge.errors import BridgeUnreachable
from tests.faults import engine, trainer
from tests.faults.fault import Fault, Repetition
from tests.faults.killed import (
    finish,
    one_in_memory,
    one_on_disk,
    pages_in_memory,
    pages_on_disk,
    some_of,
    wait_for_some,
)
from tests.faults.outcome import Outcome
from tests.faults.processes import (
    Bridge,
    asking,
    ended,
    lanes_in_memory,
    lanes_on_disk,
    paused,
    running,
    wait_until,
)
from tests.faults.verifier import verify

_SIDE_BY_SIDE = 34
_GRACE_S = 10.0


def daemon_stopped(repetition: Repetition) -> Outcome:
    """Its engine waits and sends again, its trainer is told so in time; then both go on."""
    with repetition.setting.bridge() as bridge:
        stream = repetition.stream(bridge.endpoint, resend_after_s=repetition.stop_s / 5)
        with running(engine.run, stream) as process:
            wait_for_some(repetition, stream)
            with paused(bridge.pid):
                met = process.is_alive()
                outcome = _refused_in_time(bridge.endpoint, repetition)
            outcome += finish(repetition, process, stream)
        with asking(bridge.endpoint, repetition.end) as client:
            outcome += verify(client, stream)
    return outcome + Outcome(met=met)


def _refused_in_time(endpoint: str, repetition: Repetition) -> Outcome:
    """Ask a stopped daemon, and wait until its stop is over."""
    started, timeout_s = time.monotonic(), repetition.stop_s / 4
    outcome = Outcome()
    with TraceClient(endpoint, timeout_s=timeout_s) as client:
        try:
            client.ping()
            outcome.reports.append("a stopped daemon answers")
        except BridgeUnreachable:
            late = time.monotonic() - started - timeout_s
            outcome.hangs += late > _GRACE_S  # the reason takes a second to find out
    time.sleep(max(0.0, started + repetition.stop_s - time.monotonic()))
    return outcome


def engine_stopped(repetition: Repetition) -> Outcome:
    """The daemon serves what it has of the engine meanwhile; then the engine goes on."""
    bridge: Bridge = repetition.setting
    stream = repetition.stream(bridge.endpoint)
    with running(engine.run, stream) as process:
        wait_for_some(repetition, stream)
        assert process.pid is not None
        met = process.is_alive()
        with paused(process.pid), asking(bridge.endpoint, repetition.end) as client:
            began = time.monotonic()
            outcome = verify(client, stream)
            time.sleep(max(0.0, began + repetition.stop_s - time.monotonic()))
        outcome.acknowledged = 0  # counted once, below
        outcome += finish(repetition, process, stream)
    with asking(bridge.endpoint, repetition.end) as client:
        return outcome + verify(client, stream) + Outcome(met=met)


def trainer_stopped(repetition: Repetition) -> Outcome:
    """Others are served meanwhile; then it gets what is right, late or not."""
    bridge, pages = repetition.setting
    fetches = int(repetition.rng.integers(2, 5))
    reading = repetition.reading(
        bridge.endpoint, pages, fetches=fetches, timeout_s=repetition.stop_s / 2 + 5
    )
    stream = repetition.stream(bridge.endpoint, rows=64)
    with running(trainer.run, reading) as victim, running(engine.run, stream) as process:
        wait_until(lambda: trainer.reported(reading)["asked"], repetition.end, "it fetches")
        time.sleep(repetition.rng.uniform(0.0, 0.05))
        assert victim.pid is not None
        with paused(victim.pid), asking(bridge.endpoint, repetition.end) as client:
            began, done = time.monotonic(), trainer.reported(reading)
            outcome = some_of(client, repetition, pages)
            outcome += finish(repetition, process, stream)
            time.sleep(max(0.0, began + repetition.stop_s - time.monotonic()))
        met = done["fetched"] < fetches
        ended(victim, repetition.end, "the trainer finishes")
    done = trainer.reported(reading)
    if done["fetched"] < fetches:
        outcome.reports.append(f"the trainer ended: {dict(done)}")
    outcome += Outcome(compared=done["compared"], wrong=done["wrong"], met=met)
    with asking(bridge.endpoint, repetition.end) as client:
        return outcome + verify(client, stream)


FAULTS = tuple(
    Fault(f"SIGSTOP of {peer}", tier, run, setting, _SIDE_BY_SIDE)
    for peer, run, settings in (
        ("the daemon", daemon_stopped, (lanes_on_disk, lanes_in_memory)),
        ("the engine", engine_stopped, (one_on_disk, one_in_memory)),
        ("a trainer", trainer_stopped, (pages_on_disk, pages_in_memory)),
    )
    for tier, setting in zip(("disk", "memory"), settings, strict=True)
)
