"""What Megatron-core computes when it trains: losses, gradients and weights, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scripts.unchanged.measured import Failed, Measured
from scripts.unchanged.sites import ROOT, Site

TIMEOUT_S = 300


def measure(site: Site, work: Path, ranks: tuple[int, ...] = (1, 2)) -> list[Measured]:
    """Run `training_job` on this copy with each number of ranks.

    Raises:
        Failed: a job did not finish, or imported another Megatron-core.
    """
    results = work / f"training-{site.directory.name}"
    results.mkdir(parents=True)
    for count in ranks:
        _run(site, results, count)
    names = sorted({file.name.rsplit(".", 2)[0] for file in results.iterdir()})
    return [_measured(site, name, sorted(results.glob(f"{name}.*.json"))) for name in names]


def _run(site: Site, results: Path, ranks: int) -> None:
    # A port of its own for every job, so that both trees can run at once.
    meet = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    start = (sys.executable, "-m", "torch.distributed.run", *meet)
    job = ("--nproc-per-node", str(ranks), "-m", "scripts.unchanged.training_job", str(results))
    run = subprocess.run(
        [*start, *job],
        cwd=ROOT,
        env=site.environment(TORCHDYNAMO_DISABLE="1"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if run.returncode:
        raise Failed(f"training on {site.directory.name} failed:\n{run.stderr[-3000:]}")


def _measured(site: Site, name: str, files: list[Path]) -> Measured:
    values: dict[str, str] = {}
    losses: list[float] = []
    for file in files:
        result = json.loads(file.read_text())
        imported = Path(result.pop("imported"))
        if not imported.is_relative_to(site.directory):
            raise Failed(f"training imported {imported} instead of what is in {site.directory}.")
        for kind, entries in result.items():
            values |= {f"rank {file.suffixes[0][1:]} {kind} {k}": v for k, v in entries.items()}
        losses += [float.fromhex(v) for k, v in result["losses"].items() if "micro" in k]
    return Measured(name, values, f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
