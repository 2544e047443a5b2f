"""`python -m sglang_trace.launch_server`: SGLang's server with `--trace-*` options.

Every other option goes to SGLang unchanged. The server runs in a process of its own, because SGLang
ends a server that failed by killing its whole process: what is left here can still say why, and
stop the bridge after the last record has arrived.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bridge.cli.patience import waiting_for
from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import TraceError
from patches.apply.state import verify_target
from patches.errors import PatchError
from sglang_trace.config import ENVIRONMENT, InvalidOption, TraceConfig, add_arguments

BRIDGE_TIMEOUT_S = 3.0
# A million entries of a store are read in about a minute.
OWN_BRIDGE_TIMEOUT_S = 300.0
SERVER_MODULE = "sglang_trace.server_process"


class ServerEnded(TraceError):
    """The server ended itself; the message is that of the process that met the error."""


def main(arguments: list[str]) -> int:
    """Serve until stopped; returns the exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    options, server_arguments = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(server_arguments):
        print_help()
        return 0
    try:
        if not options.trace_capture:
            refuse_options_without_capture(parser, options)
            return serve(server_arguments, {})
        verify_target("sglang")
        return capture_and_serve(options, server_arguments)
    except (TraceError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def print_help() -> None:
    """Print SGLang's options and ours, in a group of their own."""
    from sglang.srt.server_args import ServerArgs

    from sglang_trace.server_process import offer_choices

    offer_choices()
    parser = argparse.ArgumentParser(prog="python -m sglang_trace.launch_server")
    add_arguments(parser)
    ServerArgs.add_cli_args(parser)
    parser.print_help()


def refuse_options_without_capture(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> None:
    """Refuse --trace-* options that would do nothing.

    Raises:
        InvalidOption: naming them.
    """
    idle = [
        "--" + name.replace("_", "-")
        for name, value in vars(options).items()
        if value != parser.get_default(name)
    ]
    if idle:
        raise InvalidOption(f"{', '.join(idle)} only mean something together with --trace-capture.")


def capture_and_serve(options: argparse.Namespace, server_arguments: list[str]) -> int:
    """Serve with a bridge to record to, the user's or one that lives as long as the server."""
    with tempfile.TemporaryDirectory(prefix="sglang-trace-") as scratch, bridge_for(options) as at:
        config = TraceConfig(
            bridge=at,
            sites=options.trace_sites,
            layers=options.trace_layers,
            bits=options.trace_bits,
            scale_bits=options.trace_scale_bits,
            on_overflow=options.trace_on_overflow,
            failure_file=str(Path(scratch) / "failure"),
            bridge_keys=options.trace_bridge_keys or "",
        )
        status = serve(server_arguments, config.to_environment())
        failure = Path(config.failure_file)
        if failure.exists():
            raise ServerEnded(failure.read_text(encoding="utf-8"))
        return status


@contextmanager
def bridge_for(options: argparse.Namespace) -> Iterator[str]:
    """Yield the endpoint of a bridge that answers.

    Raises:
        BridgeUnreachable: none answers at --trace-bridge, or the own one did not start.
        InvalidOption: an option of the own bridge together with --trace-bridge, or keys without it.
        InvalidKeys: the key file cannot be used.
    """
    keys = options.trace_bridge_keys
    if options.trace_bridge is not None:
        if options.trace_dir is not None:
            raise InvalidOption(
                "--trace-dir is for the server's own bridge: give --dir to the bridge at "
                "--trace-bridge instead."
            )
        if options.trace_bridge_http is not None:
            raise InvalidOption(
                "--trace-bridge-http is for the server's own bridge: give --http to the bridge at "
                "--trace-bridge instead."
            )
        with (
            TraceClient(options.trace_bridge, keys=keys, timeout_s=BRIDGE_TIMEOUT_S) as client,
            waiting_for(f"the bridge at {options.trace_bridge}", BRIDGE_TIMEOUT_S),
        ):
            client.ping()
        yield options.trace_bridge
        return
    if keys is not None:
        raise InvalidOption(
            "--trace-bridge-keys is for another machine's bridge: name it with --trace-bridge; "
            "the server's own bridge is on loopback and needs no keys."
        )
    with waiting_for("the server's own bridge to read its store and listen", OWN_BRIDGE_TIMEOUT_S):
        own = spawn.start(
            options.trace_dir,
            http=options.trace_bridge_http,
            ready_timeout_s=OWN_BRIDGE_TIMEOUT_S,
        )
    print(f"{spawn.READY}{own.endpoint}", flush=True)
    if own.status_page is not None:
        print(f"{spawn.STATUS_PAGE}{own.status_page}", flush=True)
    try:
        yield own.endpoint
    finally:
        own.stop()


def serve(server_arguments: list[str], environment: dict[str, str]) -> int:
    """Run SGLang with these arguments, pass on signals to stop, and return its exit status."""
    inherited = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    server = subprocess.Popen(
        [sys.executable, "-m", SERVER_MODULE, *server_arguments], env={**inherited, **environment}
    )

    def pass_on(number: int, _frame: FrameType | None) -> None:
        server.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    # A terminal sends Ctrl-C to the server as well; this process only has to outlive it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return exit_status(server.wait())


def exit_status(code: int) -> int:
    """Return a shell's exit status: a process ended by signal N counts as 128 + N."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
