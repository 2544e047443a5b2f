"""`python -m bridge top`: tables of running daemons, live or once, or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from bridge.cli.units import format_size
from bridge.cli.watch import Watch
from bridge.errors import TraceError
from bridge.observe.status import Status, rates, to_json
from bridge.wire import TrajectoryState

Shown = Mapping[str, Status | TraceError]

_PERIOD_S = 1.0
_NOTHING = "-"


def show_live(watch: Watch) -> None:
    """Renew the tables every second until Ctrl-C."""
    with (
        suppress(KeyboardInterrupt),
        Live(tables(watch.first_statuses()), screen=True, auto_refresh=False) as live,
    ):
        while True:
            time.sleep(_PERIOD_S)
            live.update(tables(watch.statuses()), refresh=True)


def show_once(watch: Watch) -> bool:
    """Print the tables; return whether all daemons answered."""
    shown = watch.first_statuses()
    Console().print(tables(shown))
    return _all_answered(shown)


def show_json(watch: Watch) -> bool:
    """Print the status document or the error of every daemon; return whether all answered."""
    shown = watch.first_statuses()
    items = [
        json.loads(to_json(found))
        if isinstance(found, Status)
        else {"endpoint": endpoint, "error": str(found)}
        for endpoint, found in shown.items()
    ]
    print(json.dumps(items, indent=2))
    return _all_answered(shown)


def tables(shown: Shown) -> Group:
    """Return a table of the daemons and one of their engines."""
    return Group(_daemons(shown), _engines(shown))


def _all_answered(shown: Shown) -> bool:
    return all(isinstance(found, Status) for found in shown.values())


def _daemons(shown: Shown) -> Table:
    """One column per daemon, because daemons are few and values many."""
    table = Table(title="bridges")
    table.add_column("")
    for endpoint in shown:
        table.add_column(_plain(endpoint), justify="right", overflow="fold")
    columns = [_column(found) for found in shown.values()]
    for name in next(iter(columns)):
        table.add_row(name, *(column[name] for column in columns))
    return table


def _state(found: Status) -> str:
    if found.held.failing:
        return _plain(f"FAILING for {duration(found.store.for_s)}: {found.store.reason}")
    return "FULL: refuses records" if found.held.full else "serves"


def _column(found: Status | TraceError) -> dict[str, str]:
    if not isinstance(found, Status):
        return {**dict.fromkeys(_ROWS, _NOTHING), "state": _plain(str(found))}
    held, recent, states = found.held, rates(found), found.trajectories
    ack = found.ack_latency.quantile(0.99)
    values = (
        _state(found),
        f"{held.step} / {duration(found.uptime_s)}",
        f"{states[TrajectoryState.OPEN]} / {states[TrajectoryState.FINISHED]}"
        f" / {states[TrajectoryState.ABORTED]}",
        f"{found.collected[TrajectoryState.OPEN]} / {held.collected}",
        f"{held.forward_rows:,} / {held.kv_rows:,} / {held.partial_rows:,}",
        _usage(held.memory_bytes + held.index_bytes, held.memory_limit),
        _usage(held.disk_bytes, held.disk_limit),
        f"{format_size(int(recent.bytes_in))}/s, {recent.rows_in:,.0f} rows/s",
        f"{format_size(int(recent.bytes_out))}/s, {recent.rows_out:,.0f} rows/s",
        f"{found.waiting.rows:,} rows, {duration(found.waiting.oldest_s)}",
        f"{_seconds(recent.ack_s)} / {_seconds(ack)}",
        f"{held.dropped_rows:,} ({recent.dropped_rows:,.0f}/s)",
        f"{held.refused:,} {_reasons(found.refused)}".rstrip(),
    )
    return dict(zip(_ROWS, values, strict=True))


_ROWS = (
    "state",
    "RL step / up",
    "trajectories open / finished / aborted",
    "removed: expired / all",
    "rows: forward / K/V / incomplete",
    "memory",
    "disk",
    "in",
    "out",
    "unacknowledged",
    "ack latency: mean of 10 s / 99 % since start",
    "rows dropped by engines",
    "messages refused",
)


def _engines(shown: Shown) -> Table:
    table = Table(title="engines")
    table.add_column("engine", overflow="fold")
    for name in ("last seen", "forward rows", "K/V rows", "dropped rows"):
        table.add_column(name, justify="right")
    for found in shown.values():
        for engine in found.engines if isinstance(found, Status) else ():
            table.add_row(
                _plain(engine.engine),
                _NOTHING if engine.idle_s is None else f"{duration(engine.idle_s)} ago",
                *(f"{n:,}" for n in (engine.forward_rows, engine.kv_rows, engine.dropped_rows)),
            )
    return table


def duration(seconds: float) -> str:
    """Return a time span with one or two units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours == 0:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _plain(text: str) -> str:
    """Return an untrusted text without terminal escapes and rich markup."""
    return escape("".join(char if char.isprintable() else "?" for char in text))


def _usage(used: int, limit: int) -> str:
    if not limit:
        return _NOTHING
    return f"{format_size(used)} of {format_size(limit)} ({used / limit:.0%})"


def _seconds(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.1f} s"


def _reasons(refused: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items()))
