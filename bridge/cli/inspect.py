"""The content of a bridge or a store directory, as a table or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bridge.cli.patience import waiting_for
from bridge.cli.units import format_size
from bridge.client.client import TraceClient
from bridge.index.recovery import recover
from bridge.index.summary import summarize
from bridge.plain import plain
from bridge.store import DiskStore
from bridge.wire import TrajectorySummary


@dataclass(frozen=True, slots=True)
class Inspection:
    """Summaries of trajectories and the size of the store that holds them."""

    source: str
    store: str
    memory_bytes: int
    disk_bytes: int
    memory_limit: int | None
    disk_limit: int | None
    pool_bytes: int
    full: bool
    step: int
    dropped_rows: int
    trajectories: list[TrajectorySummary]


def inspect_endpoint(
    endpoint: str, prefix: str, keys: Path | None = None, timeout_s: float = 10.0
) -> Inspection:
    """Ask a running bridge; raise BridgeUnreachable."""
    with (
        TraceClient(endpoint, keys=keys, timeout_s=timeout_s) as client,
        waiting_for(f"the bridge at {endpoint}", timeout_s),
    ):
        stats = client.stats()
        return Inspection(
            endpoint,
            stats.store,
            stats.memory_bytes + stats.index_bytes,
            stats.disk_bytes,
            stats.memory_limit,
            stats.disk_limit,
            stats.pool_bytes,
            bool(stats.full),
            stats.step,
            stats.dropped_rows,
            client.list_trajectories(prefix),
        )


def inspect_directory(directory: Path, prefix: str) -> Inspection:
    """Read a store directory, whether or not a daemon serves it; raise CorruptStore."""
    store = DiskStore(directory, 0, readonly=True)
    try:
        catalog, _ = recover(store)
        names = [name for name in catalog.trajectories if name.startswith(prefix)]
        summaries = [summarize(catalog, name) for name in names]
        dropped = sum(engine.dropped_rows for engine in catalog.engine_list)
        return Inspection(
            str(directory),
            store.tier,
            memory_bytes=0,
            disk_bytes=store.usage().disk_bytes,
            memory_limit=None,
            disk_limit=None,
            pool_bytes=0,
            full=False,
            step=catalog.step,
            dropped_rows=dropped,
            trajectories=summaries,
        )
    finally:
        store.close()


def to_json(inspection: Inspection) -> str:
    """Return the inspection as JSON, with totals."""
    return json.dumps({**asdict(inspection), "totals": _totals(inspection)}, indent=2)


def render(inspection: Inspection) -> None:
    """Print the inspection as a table with totals."""
    title = escape(plain(f"{inspection.source} ({inspection.store})"))
    table = Table(title=title, show_footer=True)
    totals = _totals(inspection)
    table.add_column("trajectory", f"{len(inspection.trajectories)} trajectories", overflow="fold")
    table.add_column("state")
    for name in ("tokens", "rows", "missing_forward", "missing_kv"):
        table.add_column(name.replace("_", " "), str(totals[name]), justify="right")
    table.add_column("weight versions")
    table.add_column("bytes", format_size(totals["nbytes"]), justify="right")
    for item in inspection.trajectories:
        table.add_row(
            escape(plain(item.trajectory)),
            item.state,
            *(str(value) for value in (item.tokens, item.rows)),
            *(str(value) for value in (item.missing_forward, item.missing_kv)),
            escape(plain(", ".join(item.weight_versions))),
            format_size(item.nbytes),
        )
    console = Console()
    console.print(table)
    memory = _usage(inspection.memory_bytes, inspection.memory_limit)
    disk = _usage(inspection.disk_bytes, inspection.disk_limit)
    pool = f", Mooncake: {format_size(inspection.pool_bytes)}" if inspection.pool_bytes else ""
    console.print(
        f"memory: {memory}, disk: {disk}{pool} (a row that trajectories share is stored once)"
    )
    console.print(f"RL step {inspection.step}, {inspection.dropped_rows} rows dropped by engines")
    if inspection.full:
        console.print("the store is full and refuses records: python -m bridge gc makes room")


def _usage(used: int, limit: int | None) -> str:
    return format_size(used) if not limit else f"{format_size(used)} of {format_size(limit)}"


def _totals(inspection: Inspection) -> dict[str, int]:
    names = ("tokens", "rows", "missing_forward", "missing_kv", "nbytes")
    return {name: sum(getattr(item, name) for item in inspection.trajectories) for name in names}
