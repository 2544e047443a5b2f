"""Two bits of each block scale, from the real server through its bridge into the real trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.layout import RecordLayout
from bridge.transport.ports import held_port
from examples.demo import rollout
from examples.demo.server import Server
from examples.tiny_model import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--weight-version", "0"),
    *("--sleep-on-idle", "--enable-tokenizer-batch-encode", "--random-seed", "3"),
    *("--trace-capture", "--trace-sites", "fc1,fc2,k,v,routes", "--trace-layers", "all"),
    *("--trace-scale-bits", "2"),
)

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Run:
    samples: list[rollout.Sample]
    trainer: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A GRPO batch and a two-turn conversation, and the trainer's forward on their records."""
    out = tmp_path_factory.mktemp("low-scales")
    model = make_checkpoint(out / "model", 3)
    server = Server(model, out / "server.log", list(FLAGS))
    server.start()
    try:
        samples = rollout.generate_groups(server, 0, 2, 2, 12, 3)
        samples.append(rollout.generate_conversation(server, 0, 2, 8))
        rollout.save(samples, out / "rollout.json")
        command = [
            *(sys.executable, "-m", "megatron_trace.launch", "--nproc-per-node", "1"),
            *("--master-addr", "127.0.0.1", "--master-port", str(held_port())),
            *("examples/demo/trainer.py", "check", "--bridge", server.bridge),
            *("--model", str(model), "--rollout", str(out / "rollout.json")),
            *("--result", str(out / "result.json")),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    finally:
        server.stop()
    return Run(samples, json.loads((out / "result.json").read_text()))


def test_every_record_arrives_in_the_bytes_of_the_formula(run: Run) -> None:
    records = run.trainer["records"]
    layout = RecordLayout.from_dict(records["layout"])
    assert layout.scale_bits == 2
    assert records["missing"] == 0
    assert records["bytes_per_token"] == layout.bytes_per_token()


def test_the_trainer_reads_every_scale_and_counts_the_ambiguous_ones(run: Run) -> None:
    records, scales = run.trainer["records"], run.trainer["records"]["scales"]
    assert scales["read"] == records["guided_values"] // 16 > 0
    assert scales["ambiguous_share"] <= 0.001
    assert scales["wrong_share"] is None, "the whole scale is not in the record"


def test_guidance_closes_the_gap_as_far_as_whole_scales_do_in_the_demo(run: Run) -> None:
    gap = run.trainer["logprob_gap"]
    assert gap["tokens"] == sum(sum(sample.sampled) for sample in run.samples)
    assert gap["mean"] < 0.02, "round to nearest is at 0.05 with this model"
