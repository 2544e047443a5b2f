"""The main job, on the real patched upstreams, in small: what its report must show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.demo.requirements import REQUIREMENTS, unmet

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--prompts", "4", "--samples", "2", "--new-tokens", "24", "--seed", "3"]

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


def start_demo(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "examples.demo", "--out", str(out), *SMALL]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def outs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs with the same seed, at the same time: neither may notice the other."""
    places = [tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("demo-again")]
    runs = [start_demo(place) for place in places]
    errors = [run.communicate()[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(errors)[-4000:]
    return places


@pytest.fixture(scope="module")
def reports(outs: list[Path]) -> list[dict[str, Any]]:
    return [json.loads((out / "report.json").read_text()) for out in outs]


@pytest.fixture(scope="module")
def report(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return reports[0]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_the_report_shows_that(name: str, report: dict[str, Any]) -> None:
    assert REQUIREMENTS[name](report), {**report, "agreement": "left out"}


SPOILED: dict[str, tuple[str, dict[str, Any] | bool]] = {
    "one bit makes the trainer round as the rollout did": ("code_agreement", {"guided": 0.998}),
    "guided log probabilities are closer than round to nearest": (
        "logprob_gap",
        {"rtn": {"mean": 0.0}},
    ),
    "two bits of a scale say the rollouts scale": (
        "scales_of_two_bits",
        {"all_layers": {"read": 1000, "wrong_share": 0.002}},
    ),
    "no record is missing before or after the update": ("records_after_update", {"missing": 1}),
    "stored bytes are those of the formula": ("records", {"bytes_per_token_formula": 0}),
    "weights are equal on both sides before and after the update": (
        "weights_after_update",
        {"differing": 1},
    ),
    "the step has a gradient": ("grpo_step", {"grad_norm": 0.0}),
    "the prefix cache was hit": ("rollout", {"cached_tokens": 0}),
    "capture does not change the rollout": ("rollouts_equal_under_any_capture", False),
}


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_report_that_does_not_show_it_is_found_out(name: str, report: dict[str, Any]) -> None:
    part, change = SPOILED[name]
    spoiled = {**report[part], **change} if isinstance(change, dict) else change
    assert list(unmet({**report, part: spoiled})) == [f"does not hold: {name}"]


def test_the_step_changed_the_policy(outs: list[Path]) -> None:
    before, after = (outs[0] / name / "model.safetensors" for name in ("model", "model-step1"))
    assert before.read_bytes() != after.read_bytes()


def test_the_report_says_which_upstreams_ran(report: dict[str, Any]) -> None:
    assert report["versions"]["sglang"] == "0.5.23"
    assert report["versions"]["megatron-core"] == "0.19.2"


def test_the_picture_is_drawn(outs: list[Path]) -> None:
    assert (outs[0] / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_numbers(reports: list[dict[str, Any]]) -> None:
    report, again = reports
    assert {**again, "run": None} == {**report, "run": None}
