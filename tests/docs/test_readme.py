"""The README is short, and its first job is the file that runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAX_WORDS = 700
SERVER_TIMEOUT_S = 240
STOP_TIMEOUT_S = 60


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_readme_is_short() -> None:
    prose = re.sub(r"```.*?```", "", README, flags=re.S)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    assert len(prose.split()) <= MAX_WORDS


def test_sentences_are_short() -> None:
    lines = [line for line in README.splitlines() if line[:1] not in ("", "|", "#", "!", "[")]
    prose = re.sub(r"```.*?```", "", "\n".join(lines), flags=re.S)
    sentences = [s for s in re.split(r"(?<=[.:?])\s", prose) if len(s.split()) > 2]
    words = [len(sentence.split()) for sentence in sentences]
    assert sum(words) / len(words) <= 20
    assert max(words) <= 40


def test_the_trainer_is_printed_as_it_is() -> None:
    (script,) = blocks("python")
    assert script == (ROOT / "examples" / "first_job.py").read_text()


def test_figures_of_the_table_are_measured_ones() -> None:
    measured = json.loads((ROOT / "benchmarks/results/h200/rollout_gap.json").read_text())
    rows = {row["variant"]: row for row in measured["rows"]}
    for shown, variant in (
        ("BF16", "bf16"),
        ("FP4, round to nearest", "nearest"),
        ("guided, 1 bit, deeper half of the layers (default)", "guided, 1 bit, deeper half"),
        ("guided, 1 bit, all layers", "guided, 1 bit, all layers"),
    ):
        gap, agreement = rows[variant]["mean"], rows[variant]["agreement"]
        line = next(line for line in README.splitlines() if line.startswith(f"| {shown} |"))
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] == f"{gap:.3f}"
        if agreement is None:
            assert cells[2] == ""
        else:
            shown_share = float(cells[2].removesuffix(" %"))
            assert shown_share == pytest.approx(100 * agreement, abs=0.5)


@pytest.mark.server
def test_the_first_job_runs_as_printed(tmp_path: Path, free_ports: tuple[int, int]) -> None:
    """With other ports, so that nothing else on the machine is in the way."""
    commands = next(block for block in blocks("bash") if "traj-7" in block)
    script = (ROOT / "examples" / "first_job.py").read_text()
    for old, new in zip(("7707", "30000"), map(str, free_ports), strict=True):
        commands, script = commands.replace(old, new), script.replace(old, new)
    commands = commands.replace("python -m", f"{shlex.quote(sys.executable)} -m")
    (tmp_path / "first_job.py").write_text(script)
    steps = f"set -e\nexport PYTHONPATH={ROOT} OMP_NUM_THREADS=1\n{commands}\n"
    steps += f"{shlex.quote(sys.executable)} -m megatron_trace.launch first_job.py\n"
    shell = subprocess.Popen(
        ["bash", "-c", steps],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = _output_until(shell, "missing")
    finally:
        _end_group(shell)
    assert re.search(r"26 tokens, \d+ values guided, 0 missing", output), output[-3000:]


def _output_until(shell: subprocess.Popen[str], word: str) -> str:
    """Read what the job prints until a line has the word or the job ends."""
    assert shell.stdout is not None
    lines: list[str] = []
    end = time.monotonic() + SERVER_TIMEOUT_S
    for line in shell.stdout:
        lines.append(line)
        if line.rstrip().endswith(word) or time.monotonic() > end:
            break
    return "".join(lines)


def _end_group(shell: subprocess.Popen[str]) -> None:
    """End the job and what it left in the background; the launcher ends its server first."""
    os.killpg(shell.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_TIMEOUT_S
    while _group_lives(shell) and time.monotonic() < end:
        time.sleep(0.5)
    if _group_lives(shell):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()


def _group_lives(shell: subprocess.Popen[str]) -> bool:
    shell.poll()
    try:
        os.killpg(shell.pid, 0)
    except ProcessLookupError:
        return False
    return True
