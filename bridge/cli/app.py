"""Command line of the bridge: serve, inspect, evict, back up, make keys, count bytes.

Each command imports its own modules, so that a daemon starts in a fraction of a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bridge.cli.help_text import VersionOption, examples
from bridge.cli.units import format_size, parse_size
from bridge.daemon.run import Access, Limits, serve_until_stopped
from bridge.errors import TraceError
from bridge.observe.logs import LogFormat, Logging, LogLevel
from bridge.plain import plain
from bridge.transport.endpoints import DEFAULT_ENDPOINT
from bridge.wire import Policy

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Carry records of FP4 rollouts from inference engines to trainers.",
    epilog=(
        "Shell completion works for the same commands as `sglang-trace bridge ...`; "
        "`sglang-trace --install-completion` installs it."
    ),
)

DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Store records here (LMDB), safe against crashes.", metavar="DIR"),
]


EndpointOption = Annotated[
    str, typer.Option(help="The bridge to ask, or several, separated by commas.")
]
KeepOption = Annotated[
    int | None,
    typer.Option(
        "--keep", min=1, help="RL steps to keep, including the current one.", metavar="STEPS"
    ),
]
VersionDiffOption = Annotated[
    int | None,
    typer.Option(
        min=0, help="Evict rows this many weight versions behind the newest.", metavar="N"
    ),
]
ExpireOption = Annotated[
    int | None,
    typer.Option(
        "--expire",
        min=0,
        help="Expire unfinished trajectories without messages.",
        metavar="SECONDS",
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option("--keys", help="This client's key file (see `keys`).", metavar="FILE"),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout", min=0.1, help="Maximum time to wait for answers.", metavar="SECONDS"),
]
ParentOption = Annotated[
    int | None, typer.Option(help="Stop when this parent process ends.", metavar="PID")
]


@app.callback()
def options(_version: VersionOption = False) -> None:
    """Take the options that stand before a command's name."""


@app.command(
    epilog=examples(
        "python -m bridge serve",
        "python -m bridge serve --dir /data/bridge --disk-limit 512GiB --keep 2",
        "python -m bridge serve --http 127.0.0.1:8080 --log-format json",
        "python -m bridge serve --endpoint tcp://0.0.0.0:7707 --keys bridge.keys",
    )
)
def serve(
    endpoint: Annotated[
        str,
        typer.Option(
            help="Where to listen; other than loopback only with --keys. Port 0 takes a free port."
        ),
    ] = DEFAULT_ENDPOINT,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            help="Encrypt, and accept only the clients of this file (see `keys`).",
            metavar="FILE",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Listen beyond loopback without keys: anybody can read and write."
        ),
    ] = False,
    directory: DirOption = None,
    disk_limit: Annotated[
        str, typer.Option(help="Maximum size of the files.", metavar="SIZE")
    ] = "64GiB",
    memory_limit: Annotated[
        str, typer.Option(help="Maximum memory for records and their index.", metavar="SIZE")
    ] = "8GiB",
    spill: Annotated[
        Path | None,
        typer.Option(
            help="Directory for records that do not fit into memory, without --dir.", metavar="DIR"
        ),
    ] = None,
    mooncake: Annotated[
        str | None,
        typer.Option(
            help="Store record bytes in the Mooncake pool of this master, the rest in --dir.",
            metavar="HOST:PORT",
        ),
    ] = None,
    keep: KeepOption = None,
    max_version_diff: VersionDiffOption = None,
    expire: ExpireOption = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="Serve a status page, /metrics and /status.json here, for this machine only.",
            metavar="127.0.0.1:PORT",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="What to log to stderr.")] = LogLevel.WARNING,
    log_format: Annotated[
        LogFormat, typer.Option(help="json: one object per line, with a stable event name.")
    ] = LogFormat.TEXT,
    parent: ParentOption = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; prints `bridge ready ENDPOINT` when it listens.

    With --dir an acknowledged record survives a crash, and memory is a cache. Without --dir,
    records are in memory and then in scratch space on disk, and end with the bridge. With
    --mooncake, record bytes are in the pool's processes and survive a crash of the bridge.
    """
    with _error_messages():
        serve_until_stopped(
            endpoint,
            Access(keys, insecure),
            Limits(directory, spill, parse_size(memory_limit), parse_size(disk_limit), mooncake),
            Policy(keep, max_version_diff, expire),
            Logging(log_level, log_format),
            http,
            parent,
        )


@app.command(epilog=examples("python -m bridge mooncake --size 64GiB --port 50051"))
def mooncake(
    size: Annotated[str, typer.Option(help="Maximum memory of the pool.", metavar="SIZE")] = "8GiB",
    port: Annotated[int, typer.Option(help="Port of its master.")] = 50051,
    parent: ParentOption = None,
) -> None:
    """Run a Mooncake pool for this machine until SIGTERM or Ctrl-C, for `serve --mooncake`.

    Mooncake's transfer ports listen on every interface and ask for no password. On a machine that
    others can reach, close them with a firewall.
    """
    from bridge.cli.mooncake_pool import run_until_stopped

    with _error_messages():
        run_until_stopped(parse_size(size), port, parent)


@app.command(
    epilog=examples(
        "python -m bridge gc --keep 2", "python -m bridge gc --max-version-diff 1 --expire 3600"
    )
)
def gc(
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    keep: KeepOption = None,
    max_version_diff: VersionDiffOption = None,
    expire: ExpireOption = None,
    keys: KeysOption = None,
    timeout_s: TimeoutOption = 30.0,
) -> None:
    """Evict old records of running bridges now; pinned trajectories stay."""
    with _error_messages():
        policy = Policy(keep, max_version_diff, expire)
        if policy == Policy():
            raise TraceError("gc needs --keep, --max-version-diff or --expire to know what is old")
        from bridge.cli.patience import waiting_for
        from bridge.client.client import TraceClient

        with (
            TraceClient(endpoint, keys=keys, timeout_s=timeout_s) as client,
            waiting_for(f"the bridge at {endpoint}", timeout_s),
        ):
            done = client.gc(policy)
        print(f"evicted {done.trajectories} trajectories and {done.rows} rows")


@app.command(
    epilog=examples(
        "python -m bridge inspect",
        "python -m bridge inspect step-12/ --endpoint tcp://127.0.0.1:7707",
        "python -m bridge inspect --dir /data/bridge --json",
    )
)
def inspect(
    trajectory: Annotated[
        str,
        typer.Argument(
            help="Only trajectories whose name starts with this.", metavar="[TRAJECTORY]"
        ),
    ] = "",
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    directory: DirOption = None,
    keys: KeysOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
    timeout_s: TimeoutOption = 10.0,
) -> None:
    """List trajectories, rows and bytes of running bridges, or of a --dir without one."""
    from bridge.cli.inspect import inspect_directory, inspect_endpoint, render, to_json

    with _error_messages():
        if directory is None:
            inspection = inspect_endpoint(endpoint, trajectory, keys, timeout_s)
        else:
            inspection = inspect_directory(directory, trajectory)
        print(to_json(inspection)) if as_json else render(inspection)


DirectoryArgument = Annotated[
    Path, typer.Argument(help="The --dir of a bridge.", metavar="DIR", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, not text.")]


@app.command(epilog=examples("python -m bridge backup /data/bridge /backup/bridge"))
def backup(
    directory: DirectoryArgument,
    destination: Annotated[
        Path,
        typer.Argument(help="A new directory for the copy.", metavar="DEST", show_default=False),
    ],
    as_json: JsonOption = False,
) -> None:
    """Copy a store to DEST, also while a bridge serves it; serve the copy with --dir DEST.

    The copy is consistent and has all records that were acknowledged before the command began.
    Until it ends, the store reuses no space, so leave it room below its --disk-limit. Check the
    copy with `verify DEST`. Records in a Mooncake pool are not copied.
    """
    from bridge.store.disk.upkeep import back_up

    with _error_messages(), _progress("copying") as progress:
        copied = back_up(directory, destination, progress)
    _show(as_json, asdict(copied), f"copied {format_size(copied.nbytes)} to {destination}")


@app.command(epilog=examples("python -m bridge verify /data/bridge --json"))
def verify(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Check every row and message of a store, and rebuild its index, also while it is served.

    The exit status is 1 if anything is damaged. Trainers see damaged rows as missing; the bridge
    serves all other rows.
    """
    from bridge.cli import verify

    with _error_messages(), _progress("reading") as progress:
        found = verify.verify(directory, progress)
    damage = (
        f"{found.damaged_rows} rows, {found.lost_payloads} payloads and {found.damaged_entries} "
        "messages are damaged"
    )
    where = " (the rows of its Mooncake pool were not read)" if found.pooled else ""
    _show(
        as_json,
        {**asdict(found), "whole": found.is_whole},
        f"{found.entries} entries, {found.rows} rows, {found.trajectories} trajectories{where}; "
        f"{'nothing is damaged' if found.is_whole else damage}; checkpoint: {found.checkpoint}",
    )
    if not found.is_whole:
        raise typer.Exit(1)


@app.command(epilog=examples("python -m bridge compact /data/bridge"))
def compact(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Shrink the file of a store to its content; no bridge may serve it meanwhile.

    A store reuses the space of evicted records, but its file does not shrink by itself. The command
    writes a second file and then replaces the first, so the disk needs room for both.
    """
    from bridge.store.disk import upkeep

    with _error_messages(), _progress("copying") as progress:
        done = upkeep.compact(directory, progress)
    _show(as_json, asdict(done), f"{format_size(done.was)} before, {format_size(done.nbytes)} now")


@app.command(
    epilog=examples("python -m bridge cost", "python -m bridge cost Qwen3-30B-A3B/config.json")
)
def cost(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="config.json of a model; default: published models.", metavar="[CONFIG]"
        ),
    ] = None,
) -> None:
    """Print the bytes per token of several record layouts, as a Markdown table."""
    from bridge.cli.size_table import PUBLISHED, cost_table, read_model

    with _error_messages():
        print(cost_table(PUBLISHED if config is None else read_model(config)))


@app.command(
    epilog=examples(
        "python -m bridge top", "python -m bridge top --endpoint tcp://127.0.0.1:7707 --once"
    )
)
def top(
    endpoints: Annotated[
        list[str] | None,
        typer.Option(
            "--endpoint",
            help=f"Bridges to watch, separated by commas or repeated; default {DEFAULT_ENDPOINT}.",
        ),
    ] = None,
    keys: KeysOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON once.")] = False,
    timeout_s: TimeoutOption = 2.0,
) -> None:
    """Watch running bridges until Ctrl-C: rates, space, delays, dropped rows and engines.

    With --once or --json the exit status is 1 if a bridge does not answer.
    """
    from bridge.cli.top import show_json, show_live, show_once
    from bridge.cli.watch import Watch
    from bridge.transport.bridge_sharding import parse_endpoints

    with _error_messages():
        watched = parse_endpoints(",".join(endpoints or [DEFAULT_ENDPOINT]))
    with _error_messages(), Watch(watched, keys, timeout_s) as watch:
        if not once and not as_json:
            return show_live(watch)
        all_answer = show_json(watch) if as_json else show_once(watch)
        if not all_answer:
            raise typer.Exit(1)


@app.command(name="keys", epilog=examples("python -m bridge keys ./keys rollout trainer"))
def make_key_files(
    directory: Annotated[Path, typer.Argument(help="Folder of the files.", metavar="DIR")],
    clients: Annotated[
        list[str], typer.Argument(help="Names, such as: rollout trainer.", metavar="CLIENT...")
    ],
) -> None:
    """Make key files for a bridge and its clients, or for further clients of a bridge.

    DIR/bridge.keys stays with the bridge (serve --keys); every DIR/CLIENT.keys goes to its client.
    A bridge reads its file at start.
    """
    from bridge.transport.curve_keys import make_keys

    with _error_messages():
        for file in make_keys(directory, clients):
            print(file)


def _show(as_json: bool, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document, indent=2) if as_json else text)


@contextmanager
def _progress(doing: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows progress, on a terminal's stderr only."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(doing)
        yield lambda done, total: shown.update(task, completed=min(done, total), total=total)


@contextmanager
def _error_messages() -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        raise typer.Exit(1) from error
