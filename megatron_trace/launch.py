"""`python -m megatron_trace.launch [torchrun options] script.py ...`: torchrun for guided training.

Every option is torchrun's. Before the ranks start, the installed Megatron-core is checked against
the patch series; in every rank the imported one is checked again, because what runs need not be
what is installed (see `megatron_trace.rank`).
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from bridge.errors import TraceError
from patches import PatchError, verify_target

RANK_MODULE = "megatron_trace.rank"
AS_MODULE = "--as-module"


class UnsupportedOption(TraceError):
    """A torchrun option cannot be combined with this launcher."""


def main(arguments: Sequence[str]) -> int:
    """Run the script in every rank; returns the exit status."""
    options = get_args_parser().parse_args(arguments)
    try:
        verify_target("megatron-core")
        run(through_rank_module(options))  # type: ignore[no-untyped-call]
    except (TraceError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        sentence = f"rank {rank} ended with status {failure.exitcode}, see above"
        print(f"error: {sentence}", file=sys.stderr)
        return 1
    return 0


def through_rank_module(options: Namespace) -> Namespace:
    """Return torchrun's options with our rank module in front of the user's script.

    Raises:
        UnsupportedOption: for --no-python, which starts programs that need not be Python.
    """
    if options.no_python or options.run_path:
        raise UnsupportedOption(
            "--no-python and --run-path start something that cannot be checked in every rank: pass "
            "a Python script, or a module with -m."
        )
    kind = [AS_MODULE] if options.module else []
    options.training_script_args = [*kind, options.training_script, *options.training_script_args]
    options.training_script = RANK_MODULE
    options.module = True
    # The ranks find this package where the launcher found it, installed or not.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
