"""The main job, on the real patched upstreams, in small: what its report must show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--prompts", "4", "--samples", "2", "--new-tokens", "24", "--seed", "3"]

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def run_demo(out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "examples.demo", "--out", str(out), *SMALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    return run_demo(out)


def test_one_bit_makes_the_trainer_round_as_the_rollout_did(report: dict[str, Any]) -> None:
    code = report["code_agreement"]
    assert code["guided"] >= 0.999
    assert code["guided"] > code["rtn"]
    assert code["guided_deeper_half"] > code["rtn"]


def test_guided_log_probabilities_are_closer_to_the_rollout_than_round_to_nearest(
    report: dict[str, Any],
) -> None:
    gap = report["logprob_gap"]
    assert gap["guided_1bit_all_layers"]["mean"] < gap["rtn"]["mean"]
    assert gap["guided_1bit_all_layers"]["tokens"] == report["rollout"]["sampled_tokens"]


def test_no_record_is_missing_before_or_after_the_weight_update(report: dict[str, Any]) -> None:
    assert report["records"]["missing"] == 0
    assert report["records_after_update"]["missing"] == 0
    assert report["records"]["guided_values"] > 0


def test_stored_bytes_are_those_of_the_formula(report: dict[str, Any]) -> None:
    records = report["records"]
    assert records["bytes_per_token"] == records["bytes_per_token_formula"]
    # Row numbers, checksums and keys: the same few bytes a row whatever the model's size.
    overhead = report["run"]["stored_bytes_per_token"] - records["bytes_per_token"]
    assert 0 < overhead < 128


def test_weights_are_equal_on_both_sides_before_and_after_the_update(
    report: dict[str, Any],
) -> None:
    for when in ("weights_before_update", "weights_after_update"):
        assert report[when]["differing"] == 0
        assert report[when]["matrices"] == 4 * 8 * 3


def test_the_step_changed_the_policy(report: dict[str, Any], out: Path) -> None:
    assert report["grpo_step"]["grad_norm"] > 0
    before, after = (out / name / "model.safetensors" for name in ("model", "model-step1"))
    assert before.read_bytes() != after.read_bytes()


def test_the_prefix_cache_was_hit(report: dict[str, Any]) -> None:
    assert report["rollout"]["cached_tokens"] > 0
    assert report["records"]["rows"] < report["rollout"]["tokens"] * 2


def test_capture_does_not_change_the_rollout(report: dict[str, Any]) -> None:
    assert report["rollouts_equal_under_any_capture"] is True


def test_the_picture_is_drawn(report: dict[str, Any], out: Path) -> None:
    assert report["versions"]["sglang"] == "0.5.23"
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_numbers(
    report: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = run_demo(tmp_path_factory.mktemp("demo-again"))
    assert {**again, "run": None} == {**report, "run": None}
