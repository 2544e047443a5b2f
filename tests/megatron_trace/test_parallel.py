"""Every parallel layout overrides the same values as one rank alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import launch
from torch import Tensor

JOB = Path(__file__).parent / "jobs" / "parallel_layouts.py"
SEQUENTIAL = (
    *("one rank", "expert", "expert, allgather", "tensor", "tensor, fetched", "tensor, allgather"),
    *("tensor and expert", "context", "context, recomputed", "context and expert"),
    *("context and expert, allgather", "pipeline", "interleaved pipeline"),
    *("expert of four", "tensor and expert of four", "tensor by expert", "context by tensor"),
    *("context by tensor and expert", "context, tensor and expert of four"),
    *("context by pipeline", "pipeline by expert", "pipeline by tensor"),
)
GROUPED = tuple(f"{name}, grouped" for name in SEQUENTIAL)
LAYOUTS = SEQUENTIAL[1:] + GROUPED
LOW_SCALES = ("expert, low scales", "tensor, low scales", "context, grouped, low scales")

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    for ranks in ("2", "4"):
        job = launch("--nproc-per-node", ranks, str(JOB), str(out))
        assert job.returncode == 0, job.stderr[-4000:]
    return out


def one_rank(layout: str) -> str:
    """The run on one rank that follows the same records."""
    return "one rank, low scales" if layout in LOW_SCALES else "one rank"


def counted(out: Path, layout: str) -> dict[str, Any]:
    return json.loads((out / f"{layout}.0.json").read_text())


def gradients(out: Path, layout: str) -> dict[str, Tensor]:
    """Gradients by Hugging Face name, from all ranks: each holds its experts or its stage."""
    found: dict[str, Tensor] = {}
    for file in out.glob(f"{layout}.[0-9].pt"):
        found |= torch.load(file)
    return found


def test_every_layout_of_the_job_is_compared(results: Path) -> None:
    ran = {file.name.removesuffix(".0.json") for file in results.glob("*.0.json")}
    assert ran == {"one rank", "one rank, low scales", *LAYOUTS, *LOW_SCALES}
    assert len(LAYOUTS) >= 30


@pytest.mark.parametrize("layout", LAYOUTS + LOW_SCALES)
def test_the_layout_computes_what_one_rank_computes(results: Path, layout: str) -> None:
    """The records are forged, so a row given to another token would change counts and loss."""
    alone, ours = counted(results, one_rank(layout)), counted(results, layout)
    assert len(alone["counts"]) == 5 * 4
    assert ours["counts"] == alone["counts"]
    assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS + LOW_SCALES)
def test_the_layout_trains_like_one_rank(results: Path, layout: str) -> None:
    alone, ours = gradients(results, one_rank(layout)), gradients(results, layout)
    assert ours.keys() == alone.keys()
    for name, expected in alone.items():
        assert (ours[name] - expected).abs().max() <= 1e-5 * expected.abs().max(), name
