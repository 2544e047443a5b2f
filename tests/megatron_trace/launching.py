"""Starting jobs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def run_python(*arguments: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run this interpreter, one thread, with `path` in front of everything importable here."""
    search = os.pathsep.join([*map(str, (*path, ROOT)), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron_trace.launch`."""
    return run_python("-m", "megatron_trace.launch", *arguments)
