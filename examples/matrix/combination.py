"""One pair of upstream versions: its demo run, and what is wrong with the report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demo.requirements import unmet
from examples.demo.stages import StageFailed, Stages, read_json

SGLANG = ("0.5.21", "0.5.23")
MEGATRON_CORE = ("0.16.1", "0.19.2")


@dataclass(frozen=True)
class Combination:
    """The versions that run together."""

    sglang: str
    megatron_core: str

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.sglang}-{self.megatron_core}"

    @property
    def versions(self) -> dict[str, str]:
        """Version by target, as the demo's report has them."""
        return {"sglang": self.sglang, "megatron-core": self.megatron_core}


@dataclass(frozen=True)
class Outcome:
    """A run: its report, None if there is none, and why it did not pass; wall time in seconds."""

    combination: Combination
    out: Path
    report: dict[str, Any] | None
    failures: tuple[str, ...]
    seconds: float


def select(only: str) -> list[Combination]:
    """The combinations of the versions in a comma-separated list.

    Of an upstream that the list has no version of, all versions are taken.

    Raises:
        ValueError: for a version that the matrix does not have.
    """
    wanted = {version for version in only.split(",") if version}
    if unknown := wanted - {*SGLANG, *MEGATRON_CORE}:
        known = ", ".join((*SGLANG, *MEGATRON_CORE))
        raise ValueError(f"the matrix has no {', '.join(sorted(unknown))}; choose from {known}.")

    def chosen(versions: tuple[str, ...]) -> list[str]:
        return [v for v in versions if v in wanted] or list(versions)

    return [Combination(s, m) for s in chosen(SGLANG) for m in chosen(MEGATRON_CORE)]


def run(
    combination: Combination,
    overlays: Sequence[Path],
    out: Path,
    size: Sequence[str],
    stages: Stages,
) -> Outcome:
    """Runs the demo with the overlays first on the path, and judges its report."""
    out.mkdir(parents=True, exist_ok=True)
    written = out / "report.json"
    written.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.demo", "--out", str(out), *size]
    path = [*map(str, overlays), *filter(None, [os.environ.get("PYTHONPATH")])]
    what = " x ".join(combination.versions.values())
    failed: tuple[str, ...] = ()
    started = time.monotonic()
    try:
        environment = {"PYTHONPATH": os.pathsep.join(path)}
        stages.process(f"demo on {what}", command, out / "demo.log", environment)
    except StageFailed as failure:
        failed = (str(failure),)
    report = read_json(written) if written.exists() else None
    failures = () if report is None else tuple(judge(combination, report))
    seconds = round(time.monotonic() - started, 1)
    return Outcome(combination, out, report, failures or failed, seconds)


def judge(combination: Combination, report: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a report: other versions than asked for, unmet requirements."""
    for name, wanted in combination.versions.items():
        if (ran := report["versions"][name]) != wanted:
            yield f"{name} {ran} ran, not {wanted}"
    yield from unmet(report)
