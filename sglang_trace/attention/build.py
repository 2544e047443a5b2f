"""Compile a CUDA C++ kernel with nvcc when it is first used, and keep the library.

Each combination of constants (head size, heads a group, ...) is a library of its own, so that only
what a model needs is compiled: a few seconds, once a machine.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from bridge.errors import TraceError

SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    "-std=c++17",
    "-O3",
    "--use_fast_math",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-shared",
    "-Xcompiler=-fPIC",
)


class KernelBuildError(TraceError):
    """A kernel cannot be compiled here."""


def load(source: str, constants: Mapping[str, int]) -> ctypes.CDLL:
    """Return the library of ``csrc/source`` with ``constants`` as macros, compiled if need be.

    Raises:
        KernelBuildError: there is no nvcc, it refuses the source, or the library cannot be kept.
    """
    macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    text = (SOURCES / source).read_bytes()
    compiler = _nvcc()
    identity = "\n".join([_version(compiler), *_FLAGS, *macros]).encode() + text
    library = _cache() / f"{Path(source).stem}-{hashlib.sha256(identity).hexdigest()[:24]}.so"
    if not library.exists():
        _compile([compiler, *_FLAGS, *macros, str(SOURCES / source)], library)
    return ctypes.CDLL(str(library))


def _compile(command: list[str], library: Path) -> None:
    """Compile beside the final name and rename, so that ranks may do it at the same time."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(
            f"compiled kernels cannot be kept in {library.parent} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise KernelBuildError(
                f"nvcc cannot compile {command[-1]}; put one of CUDA 12.4 or later on PATH or set "
                f"CUDA_HOME; the command was {' '.join(command)} and it said: "
                f"{(done.stderr or done.stdout).strip()[-2000:]}"
            )
        made.replace(library)


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    candidates += [Path(found)] if (found := shutil.which("nvcc")) else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for candidate in candidates:
        if candidate.exists():
            return str(candidate)
    raise KernelBuildError(
        "the FP4 attention kernel needs nvcc of CUDA 12.4 or later; install the CUDA toolkit and "
        "put nvcc on PATH or set CUDA_HOME"
    )


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sglang-trace" / "kernels"
