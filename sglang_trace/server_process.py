"""The process in which SGLang runs; the launcher starts it with the options to capture in place."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from bridge.errors import TraceError
from bridge.layout import Site
from sglang_trace import failure, hooks
from sglang_trace.config import KV_CACHE_DTYPE, QUANTIZATION, TraceConfig
from sglang_trace.hardware import is_hopper
from sglang_trace.preflight import cpu_host


class PortInUse(TraceError):
    """Another process serves on the port."""


def main(arguments: list[str]) -> None:
    """Serve with these SGLang arguments until the server is told to stop."""
    hooks.on_import()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    from sglang_trace.attention import options as attention_options
    from sglang_trace.attention import unsupported as attention_refusals

    end_with_parent()
    load_plugins()
    config = TraceConfig.from_environment()
    if config is not None:
        from sglang_trace.preflight import hook_check

        hook_check.check_options()
    offer_choices()
    attention_options.allow_fp4_kv_cache()
    server_args = parse(arguments, defaults(config))
    if attention_refusals.is_asked_for(server_args):
        attention_refusals.check_arguments(resolved(server_args))
    if config is not None:
        from sglang_trace.preflight import unsupported

        check_port(server_args.host, server_args.port)
        hook_check.check_server()
        unsupported.check_arguments(resolved(server_args), config)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def offer_choices() -> None:
    """Let `--quantization` and `--attention-backend` take ours."""
    # All releases have both names in this module, although the list itself has moved.
    from sglang.srt.server_args import QUANTIZATION_CHOICES, add_quantization_method_choices

    if QUANTIZATION not in QUANTIZATION_CHOICES:
        add_quantization_method_choices([QUANTIZATION])
    from sglang_trace.attention import options

    options.offer()


def defaults(config: TraceConfig | None) -> dict[str, str]:
    """Return what this host and capture ask for where the user chooses nothing.

    Without capture (no `config`) only a host without GPU gets defaults of ours: the device, and an
    attention backend that needs no compiled kernel. With capture a CPU host keeps K and V in FP4,
    a Hopper GPU does if they are recorded, and a GPU host makes no CUDA graphs of prefill.
    """
    chosen: dict[str, str] = {}
    if cpu_host.is_cpu_host():
        chosen["device"] = "cpu"
    if cpu_host.has_kernel_stand_in():
        chosen["attention_backend"] = cpu_host.ATTENTION_BACKEND
    if config is not None:
        chosen["quantization"] = QUANTIZATION
        records_kv = bool({Site.K, Site.V} & set(config.sites))
        # SGLang itself refuses this dtype on other GPUs, with a reason that is not ours.
        if cpu_host.is_cpu_host() or (records_kv and is_hopper()):
            chosen["kv_cache_dtype"] = KV_CACHE_DTYPE
        if not cpu_host.is_cpu_host():
            chosen["cuda_graph_backend_prefill"] = "disabled"
    return chosen


def parse(arguments: list[str], chosen: dict[str, str]) -> Any:
    """Return SGLang's options, with `chosen` as defaults of its parser.

    Some releases resolve all options while they parse, so setting them afterwards is too late.
    What depends on what the user chose is filled in as soon as that is known.

    Raises:
        AttentionRefused: an FP4 KV cache with an attention backend that does not read it.
        NotCaptured: a checkpoint that is quantized already, for experts that we quantize.
    """
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    from sglang_trace.attention import options
    from sglang_trace.preflight import checkpoint

    add_cli_args = ServerArgs.add_cli_args

    def add_with_defaults(parser: argparse.ArgumentParser) -> None:
        add_cli_args(parser)
        parser.set_defaults(**chosen)
        parse_args = parser.parse_args

        def parse_and_choose(arguments: list[str]) -> argparse.Namespace:
            parsed = parse_args(arguments)
            options.choose(parsed)
            # Before SGLang compares the two methods itself, with a stack trace.
            checkpoint.check_checkpoint(parsed)
            return parsed

        parser.parse_args = parse_and_choose  # type: ignore[assignment,method-assign]

    ServerArgs.add_cli_args = staticmethod(add_with_defaults)
    try:
        return prepare_server_args(arguments)
    finally:
        ServerArgs.add_cli_args = staticmethod(add_cli_args)


def resolved(server_args: Any) -> Any:
    """Return SGLang's options with the values that it will use."""
    from sglang.srt.arg_groups.overrides import resolved_view

    # Releases without this step have resolved their options while they parsed them.
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return resolved_view(server_args)


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
    except TraceError as error:
        if TraceConfig.from_environment() is None:
            # With capture the launcher says it.
            print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
