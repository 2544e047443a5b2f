"""The process in which SGLang runs; the launcher starts it with the options to capture in place."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from bridge.errors import TraceError
from sglang_trace import cpu_host, failure, hooks
from sglang_trace.config import KV_CACHE_DTYPE, QUANTIZATION, TraceConfig

# SGLang's own text for "no backend was asked for" is None.
KV_CACHE_AUTO = "auto"


class PortInUse(TraceError):
    """Another process serves on the port."""


def main(arguments: list[str]) -> None:
    """Serve with these SGLang arguments until the server is told to stop."""
    hooks.on_import()
    from sglang.launch_server import run_server
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    end_with_parent()
    load_plugins()
    config = TraceConfig.from_environment()
    server_args = parse(arguments, capturing=config is not None)
    if config is not None:
        from sglang_trace import liveness, refusals

        check_port(server_args.host, server_args.port)
        liveness.check_server()
        server_args.resolve_once()
        refusals.check_arguments(resolved_view(server_args), config)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def parse(arguments: list[str], *, capturing: bool) -> Any:
    """Return SGLang's options, with our defaults where the user chose nothing.

    Without capture only a host without GPU gets defaults of ours: the device, and an attention
    backend that needs no compiled kernel.
    """
    from sglang.srt.server_args import prepare_server_args

    offer_quantization()
    server_args = prepare_server_args(arguments)
    for name, value in defaults(capturing).items():
        if getattr(server_args, name) in (None, KV_CACHE_AUTO):
            setattr(server_args, name, value)
    return server_args


def offer_quantization() -> None:
    """Let `--quantization` take our method."""
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES, add_quantization_method_choices

    if QUANTIZATION not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([QUANTIZATION])


def defaults(capturing: bool) -> dict[str, str]:
    """Return what this host and capture ask for."""
    chosen: dict[str, str] = {}
    if cpu_host.is_cpu_host():
        chosen["device"] = "cpu"
    if cpu_host.has_kernel_stand_in():
        chosen["attention_backend"] = cpu_host.ATTENTION_BACKEND
    if capturing:
        chosen["quantization"] = QUANTIZATION
        chosen["kv_cache_dtype"] = KV_CACHE_DTYPE
    return chosen


def end_with_parent() -> None:
    """Stop serving when the launcher is gone without having stopped this process."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="trace-parent", daemon=True).start()


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken, before a model is loaded for it.

    Raises:
        PortInUse: naming the port.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"Cannot serve on {host}:{port} ({error.strerror}): choose another with --port."
            ) from None


if __name__ == "__main__":
    try:
        with failure.reported():
            main(sys.argv[1:])
    except TraceError:
        sys.exit(1)
