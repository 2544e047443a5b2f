"""The upstreams' own unit tests, from a checkout that the user has; none of them is kept here.

Those are run that reach the files we patch and need neither GPU kernels nor a download. Only the
tests come from the checkout: the package under test is the released or the patched copy. Every
file or directory of the selection runs in a process of its own, with a limit on time and threads.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from bridge.transport.ports import held_port
from scripts.unchanged.measured import Failed, Measured
from scripts.unchanged.sites import Site
from scripts.unchanged.stand_in import make_stand_in

RUN_TIMEOUT_S, TEST_TIMEOUT_S = 240, 60
PROCESS_LIMIT = 2048
# Nothing may be downloaded: every proxy is one that refuses.
OFFLINE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "localhost,127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class Suite:
    """Where an upstream keeps its unit tests, and what of its checkout they import.

    `package` is the part of the checkout that must not hide the copy under test.
    """

    copied: tuple[str, ...]
    package: str
    start: str
    selection: tuple[str, ...]
    plugins: tuple[str, ...] = ()


SUITES = {
    "megatron-core": Suite(
        copied=("tests/__init__.py", "tests/unit_tests", "tests/test_utils", "megatron", "*.py"),
        package="megatron/core",
        start=".",
        plugins=("scripts.unchanged.megatron_on_cpu",),
        selection=(
            "tests/unit_tests/transformer/moe/test_routers.py",
            "tests/unit_tests/transformer/moe/test_moe_layer.py",
            "tests/unit_tests/transformer/moe/test_router_replay.py",
            "tests/unit_tests/transformer/test_transformer_block.py",
            "tests/unit_tests/tensor_parallel/test_random.py",
            "tests/unit_tests/pipeline_parallel/test_schedules.py",
        ),
    ),
    "sglang": Suite(
        copied=("test",),
        package="python/sglang",
        start="test",
        selection=(
            "registered/unit/managers",
            "registered/unit/mem_cache",
            "registered/unit/model_executor",
            "registered/unit/layers/moe",
            "registered/unit/layers/quantization",
            "registered/unit/entrypoints",
            "registered/unit/sampling",
        ),
    ),
}


def find_checkout(target: str, checkouts: Iterable[Path]) -> Path | None:
    """The first of the checkouts that has this target's tests."""
    suite = SUITES[target]
    for checkout in checkouts:
        if any((checkout / suite.start / path).exists() for path in suite.selection):
            return checkout
    return None


def describe(target: str, checkout: Path, released: Site) -> str:
    """Say how far the checkout is the release under test: its package's Python files compared."""
    package = checkout / SUITES[target].package
    name = SUITES[target].package.removeprefix("python/")
    files = [file for file in package.rglob("*.py") if file.is_file()]
    pairs = [(file, released.directory / name / file.relative_to(package)) for file in files]
    same = sum(
        theirs.is_file() and theirs.read_bytes() == file.read_bytes() for file, theirs in pairs
    )
    return f"{same} of the checkout's {len(files)} package files are those of {released.version}"


def copy_suite(target: str, checkout: Path, to: Path) -> Path:
    """Copy what the tests need, without the package itself; return the place to run them from."""
    suite = SUITES[target]
    for pattern in suite.copied:
        for found in checkout.glob(pattern):
            place = to / found.relative_to(checkout)
            place.parent.mkdir(parents=True, exist_ok=True)
            if found.is_dir():
                shutil.copytree(found, place)
            elif found.name != "setup.py":
                shutil.copy(found, place)
    shutil.rmtree(to / suite.package, ignore_errors=True)
    return to / suite.start


def measure(site: Site, place: Path, work: Path) -> list[Measured]:
    """Run the suite's selection on this copy.

    Raises:
        Failed: no test passed, so that equal results would say nothing.
    """
    outcomes: dict[str, str] = {}
    for path in SUITES[site.target].selection:
        if (place / path).exists():
            outcomes |= _run(site, place, path, work)
    counts = Counter(outcome.partition(":")[0] for outcome in outcomes.values())
    if not counts["passed"]:
        first = next(iter(outcomes.values()), "none was found")
        raise Failed(f"none of {site.target}'s own tests passed here; the first says {first!r}.")
    shown = ", ".join(f"{counts[each]} {each}" for each in ("passed", "skipped", "failed", "error"))
    return [Measured("own unit tests", outcomes, shown)]


def _run(site: Site, place: Path, path: str, work: Path) -> dict[str, str]:
    """Outcomes of one file or directory; of one that did not come to its end, only that."""
    results = work / f"{site.directory.name}-{path.replace('/', '-')}.xml"
    command = [sys.executable, "-m", "pytest", path, "-q", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "--continue-on-collection-errors"]
    command += ["--timeout", str(TEST_TIMEOUT_S), "--junitxml", str(results)]
    for plugin in ("scripts.unchanged.thread_limit", *SUITES[site.target].plugins):
        command += ["-p", plugin]
    stand_in = (make_stand_in(work / "stand_in"),) if site.target == "sglang" else ()
    environment = site.environment(*stand_in, **OFFLINE, MASTER_PORT=str(held_port()))
    site.require_first(environment)
    try:
        run = subprocess.run(
            ["prlimit", f"--nproc={PROCESS_LIMIT}", *command],
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {path: f"error: not done after {RUN_TIMEOUT_S} s"}
    # 0: all passed, 1: some failed, 2: some files could not be imported.
    if run.returncode not in (0, 1, 2) or not results.exists():
        last = (run.stdout.strip().splitlines() or [""])[-1]
        return {path: f"error: pytest ended with {run.returncode}: {last}"}
    return read_outcomes(results)


def read_outcomes(results: Path) -> dict[str, str]:
    """Test name -> `passed`, `skipped`, or `failed` or `error` with the kind of exception.

    Messages are left out because they hold paths and times; addresses in names likewise.
    """
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        name = re.sub(r"0x[0-9a-f]+", "0x", name)
        for problem in case:
            if problem.tag == "skipped":
                outcomes[name] = "skipped"
            elif problem.tag in ("failure", "error"):
                kind = "failed" if problem.tag == "failure" else "error"
                first = (problem.get("message") or "").partition("\n")[0]
                outcomes[name] = f"{kind}: {first.partition(':')[0][:60]}"
        outcomes.setdefault(name, "passed")
    return outcomes
