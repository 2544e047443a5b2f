"""What the launcher starts in every rank: prepare the host, check the hooks, run the user's script.

A `TraceError` of the script ends the rank with one sentence on stderr and status 1.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge.errors import TraceError
from megatron_trace.launch import AS_MODULE
from megatron_trace.preflight import cpu_host
from megatron_trace.preflight.hook_check import require_live_hooks


def main(arguments: Sequence[str]) -> int:
    """Run `[--as-module] script arguments...` as `__main__`; returns the exit status."""
    as_module = arguments[0] == AS_MODULE
    script, *script_arguments = arguments[as_module:]
    try:
        cpu_host.prepare()
        require_live_hooks()
        sys.argv = [script, *script_arguments]
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except TraceError as error:
        # torchrun's ranks share one unbuffered stderr: print would write the line in two pieces.
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
