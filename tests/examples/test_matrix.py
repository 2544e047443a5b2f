"""The demo on other upstream releases: the short form of `make matrix`, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.matrix.combination import MEGATRON_CORE, SGLANG, Combination, judge, select
from examples.matrix.overlay import make_overlay
from patches import PatchError, verify_target
from patches.config import select_target

ROOT = Path(__file__).resolve().parents[2]
OLDER = ["--only", "0.5.21,0.16.1"]


def run_matrix(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.matrix", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The older release of each upstream; the demo's own test has the newer ones."""
    out = tmp_path_factory.mktemp("matrix")
    done = run_matrix("--short", *OLDER, "--out", str(out))
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((out / "matrix.json").read_text())
    return result


@pytest.mark.server
@pytest.mark.timeout(900)
def test_the_demo_passes_on_the_older_releases(short: dict[str, Any]) -> None:
    (run,) = short["runs"]
    assert run["failures"] == []
    assert run["report"]["versions"]["sglang"] == "0.5.21"
    assert run["report"]["versions"]["megatron-core"] == "0.16.1"


@pytest.mark.server
@pytest.mark.timeout(900)
def test_another_release_than_asked_for_is_a_failure(short: dict[str, Any]) -> None:
    (run,) = short["runs"]
    assert list(judge(Combination("0.5.21", "0.16.1"), run["report"])) == []
    assert list(judge(Combination("0.5.23", "0.16.1"), run["report"])) == [
        "sglang 0.5.21 ran, not 0.5.23"
    ]


def test_the_whole_matrix_is_every_pair() -> None:
    assert len(set(select(""))) == len(SGLANG) * len(MEGATRON_CORE)


def test_a_version_selects_its_row_and_two_versions_where_they_cross() -> None:
    assert select("0.5.21") == [Combination("0.5.21", m) for m in MEGATRON_CORE]
    assert select("0.16.1,0.5.23") == [Combination("0.5.23", "0.16.1")]


def test_an_unknown_version_is_refused_by_name() -> None:
    done = run_matrix("--only", "0.5.99")
    assert done.returncode == 1
    assert done.stderr.startswith("error: the matrix has no 0.5.99; choose from 0.5.21, ")


def test_a_release_that_cannot_be_patched_fails_its_runs_with_the_reason(tmp_path: Path) -> None:
    for name in ("sglang-0.5.21", "megatron-core-0.16.1"):
        (tmp_path / "sites" / name).mkdir(parents=True)
    done = run_matrix(*OLDER, "--out", str(tmp_path), "--sites", str(tmp_path / "sites"))
    assert done.returncode == 1
    (run,) = json.loads((tmp_path / "matrix.json").read_text())["runs"]
    assert run["report"] is None
    assert [failure.split(":")[0] for failure in run["failures"]] == [
        "sglang 0.5.21",
        "megatron-core 0.16.1",
    ]


def test_an_overlay_is_made_once_and_patched(tmp_path: Path) -> None:
    target = select_target("megatron-core")
    place = make_overlay(target, "0.16.1", tmp_path)
    verify_target("megatron-core", site=place)
    made = place.stat()
    assert make_overlay(target, "0.16.1", tmp_path) == place
    assert place.stat().st_ino == made.st_ino
    assert [entry.name for entry in tmp_path.iterdir()] == [place.name]


def test_an_overlay_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PatchError):
        make_overlay(select_target("megatron-core"), "0.0.99", tmp_path)
    assert list(tmp_path.iterdir()) == []
