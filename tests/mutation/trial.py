"""One mutation tried: a fork imports the changed source in the place of the module and runs tests.

The parent has imported the heavy packages and nothing of ours, so a fork starts at once and every
module of ours that imports the changed one gets the change.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import sys
from enum import StrEnum
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.mutation.targets import Target

_PASSED, _FAILED, _INTERRUPTED, _INTERNAL, _USAGE = range(5)
_HEAVY = (
    *("torch", "torch.distributed", "torch._subclasses.fake_tensor", "numpy", "xxhash", "lmdb"),
    *("msgpack", "zmq", "hypothesis.strategies", "_hypothesis_pytestplugin"),
)
_MEMORY = 8 << 30

# The same examples every time, and no search for a smaller one: that it fails is enough.
settings.register_profile(
    "mutation",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


class Verdict(StrEnum):
    """What the tests said to a mutation."""

    KILLED = "killed"
    SURVIVED = "survived"


def prepare() -> None:
    """Import once, before the forks, what costs time; nothing of ours is among it."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in _HEAVY:
        importlib.import_module(name)
    pytest.main(["--version"])  # imports pytest's own plugins
    gc.collect()
    gc.freeze()


class NoVerdict(Exception):
    """pytest ended without having judged the mutation."""


def start(target: Target, source: str, cpu_s: int) -> int:
    """Fork a process that runs the target's tests on ``source``; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        status = _run(target, source, cpu_s)
    finally:
        os._exit(status)


def verdict(status: int) -> Verdict:
    """Return what a process's wait status says.

    Raises:
        NoVerdict: it says neither.
    """
    if os.WIFSIGNALED(status):
        return Verdict.KILLED  # out of CPU time, or crashed
    code = os.WEXITSTATUS(status)
    if code == _PASSED:
        return Verdict.SURVIVED
    if code in (_FAILED, _INTERRUPTED, _INTERNAL, _USAGE):
        return Verdict.KILLED
    raise NoVerdict(f"pytest ended with status {code}; run the target's tests by hand.")


def _run(target: Target, source: str, cpu_s: int) -> int:
    # CPU time, not time: on a busy machine a slow test is no failing one. No test here waits.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    sys.meta_path.insert(0, _Changed(target.module, target.path, source))
    # File by file: the first one ends most trials, and the others need not be collected.
    codes = (int(pytest.main(_arguments(test))) for test in target.tests)
    return next((code for code in codes if code != _PASSED), _PASSED)


def _arguments(test: str) -> list[str]:
    # A conftest imports the daemon or compiles kernels; none of these tests uses what it offers.
    options = ["--noconftest", "-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
    options += ["-p", "_hypothesis_pytestplugin", "--hypothesis-profile=mutation"]
    return [*options, test]


class _Changed(MetaPathFinder, InspectLoader):
    """Finds one module, and gives it the changed source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        self._module, self._path, self._source = module, path, source

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = spec_from_loader(fullname, self, origin=self._path)
        assert spec is not None
        if self._path.endswith("/__init__.py"):
            spec.submodule_search_locations = [os.path.dirname(os.path.abspath(self._path))]
        return spec

    def is_package(self, fullname: str) -> bool:
        return self._path.endswith("/__init__.py")

    def get_source(self, fullname: str) -> str:
        return self._source

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = os.path.abspath(self._path)
        exec(compile(self._source, self._path, "exec"), module.__dict__)
