"""The stages of the demo in order, and what each hands to the next."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bridge.embedded import EmbeddedBridge
from bridge.embedded import start as start_bridge
from examples.demo import rollout
from examples.demo.rollout import Sample
from examples.demo.server import Server
from examples.demo.stages import Stages, read_json
from examples.tiny_model import make_checkpoint

# A pool and batch small enough that requests queue and later ones find the few-shot prefix cached.
SERVER_FLAGS = [
    *("--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--chunked-prefill-size", "256", "--enable-tokenizer-batch-encode"),
]
FULL_CAPTURE = [
    *("--trace-sites", "fc1,fc2,k,v,routes", "--trace-layers", "all", "--trace-bits", "4"),
]


@dataclass(frozen=True)
class Job:
    """What to run and where its files go."""

    out: Path
    seed: int
    prompts: int
    samples: int
    new_tokens: int

    @property
    def model(self) -> Path:
        """The checkpoint both sides start from."""
        return self.out / "model"

    @property
    def updated_model(self) -> Path:
        """The checkpoint after the GRPO step."""
        return self.out / "model-step1"


def _server(job: Job, stages: Stages, name: str, flags: list[str]) -> Server:
    return Server(
        job.model,
        job.out / f"server-{name}.log",
        [*SERVER_FLAGS, "--random-seed", str(job.seed), *flags],
    )


def _capture_flags(bridge: EmbeddedBridge) -> list[str]:
    return ["--trace-capture", "--trace-bridge", bridge.endpoint]


def _generate(job: Job, stages: Stages, server: Server, step: int) -> list[Sample]:
    total = job.prompts * job.samples
    with stages.stage(f"step {step}: {total} samples of {job.new_tokens} tokens, 1 conversation"):
        groups = rollout.generate_groups(
            server, step, job.prompts, job.samples, job.new_tokens, job.seed
        )
        talk = rollout.generate_conversation(server, step, job.prompts, job.new_tokens // 2)
    return [*groups, talk]


def _train(job: Job, stages: Stages, name: str, mode: str, *args: str) -> dict[str, Any]:
    result = job.out / f"{mode}.json"
    script = Path(__file__).with_name("trainer.py")
    command = [
        *(sys.executable, "-m", "megatron_trace.launch", "--nproc-per-node", "1", str(script)),
        *(mode, "--seed", str(job.seed), "--result", str(result), *args),
    ]
    stages.process(name, command, job.out / f"trainer-{mode}.log")
    answer: dict[str, Any] = read_json(result)
    return answer


def _main_job(job: Job, stages: Stages, bridge: EmbeddedBridge) -> dict[str, Any]:
    """Default capture → guided GRPO step → weights back → generate again."""
    server = _server(job, stages, "main", _capture_flags(bridge))
    with stages.stage("start SGLang: FP4 experts and KV cache, default capture"):
        server.__enter__()
    try:
        first = _generate(job, stages, server, 0)
        rollout.save(first, job.out / "rollout-0.json")
        step = _train(
            job,
            stages,
            "Megatron: guided GRPO step",
            "step",
            *("--model", str(job.model), "--save", str(job.updated_model)),
            *("--rollout", str(job.out / "rollout-0.json"), "--bridge", bridge.endpoint),
        )
        with stages.stage("send the new weights to the running server"):
            server.update_weights(job.updated_model, "1")
        second = _generate(job, stages, server, 1)
        rollout.save(second, job.out / "rollout-1.json")
        after = _train(
            job,
            stages,
            "Megatron: records of the second rollout",
            "check",
            *("--model", str(job.updated_model)),
            *("--rollout", str(job.out / "rollout-1.json"), "--bridge", bridge.endpoint),
        )
    finally:
        server.__exit__()
    return {"first": first, "second": second, "step": step, "after": after}


def _compare(job: Job, stages: Stages, bridge: EmbeddedBridge) -> dict[str, Any]:
    """Full capture and BF16 rollouts of the same checkpoint, every way to round in the trainer."""
    flags = [*_capture_flags(bridge), *FULL_CAPTURE]
    with stages.stage("start SGLang: FP4, full capture"):
        server = _server(job, stages, "full", flags).__enter__()
    try:
        full = _generate(job, stages, server, 0)
    finally:
        server.__exit__()
    with stages.stage("start SGLang: BF16, no capture"):
        server = _server(job, stages, "bf16", ["--device", "cpu"]).__enter__()
    try:
        bf16 = _generate(job, stages, server, 0)
    finally:
        server.__exit__()
    rollout.save(full, job.out / "rollout-full.json")
    rollout.save(bf16, job.out / "rollout-bf16.json")
    variants = _train(
        job,
        stages,
        "Megatron: log-probabilities under every way to round",
        "compare",
        *("--model", str(job.model), "--bridge", bridge.endpoint),
        *("--rollout", str(job.out / "rollout-full.json")),
        *("--bf16-rollout", str(job.out / "rollout-bf16.json")),
    )
    return {"full": full, "bf16": bf16, "variants": variants}
