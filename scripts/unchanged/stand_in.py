"""A directory that lets the released SGLang be imported on a host without a GPU.

The released SGLang imports a CUDA-only kernel package at module level, in every process that it
starts. Python runs `sitecustomize` before anything else in each of them, so the stand-in can be
put in place without touching a file of SGLang. The patched SGLang calls the same function itself.
"""

from __future__ import annotations

from pathlib import Path

TEXT = "from sglang_trace.preflight import cpu_host\n\ncpu_host.prepare()\n"


def make_stand_in(directory: Path) -> Path:
    """Write the module and return the directory to put on the path."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(TEXT)
    return directory
