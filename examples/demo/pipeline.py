"""The stages of the demo in order, and what each hands to the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.transport.ports import held_port
from examples.demo import rollout
from examples.demo.rollout import Sample
from examples.demo.server import Server
from examples.demo.stages import Stages, read_json
from examples.demo.summary import summarize
from examples.tiny_model import make_checkpoint

# A pool and batch small enough that requests queue and later ones find the few-shot prefix cached.
SERVER_FLAGS = [
    *("--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--chunked-prefill-size", "256", "--enable-tokenizer-batch-encode", "--sleep-on-idle"),
    *("--weight-version", "0"),
]
CAPTURE = ["--trace-capture"]
FULL_CAPTURE = [
    *CAPTURE,
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


def run(job: Job, stages: Stages) -> dict[str, Any]:
    """The whole demo; returns the report."""
    with stages.stage("make a small Qwen3-MoE checkpoint"):
        make_checkpoint(job.model, job.seed)
    main = _main_job(job, stages)
    comparison = _comparison(job, stages)
    return summarize(job, main, comparison, stages.seconds)


@contextmanager
def _serving(job: Job, stages: Stages, what: str, name: str, flags: list[str]) -> Iterator[Server]:
    """A running server; the stage is its start."""
    seed = ["--random-seed", str(job.seed)]
    server = Server(job.model, job.out / f"server-{name}.log", [*SERVER_FLAGS, *seed, *flags])
    with stages.stage(f"start SGLang: {what}"):
        server.start()
    try:
        yield server
    finally:
        server.stop()


def _generate(job: Job, stages: Stages, server: Server, what: str, step: int = 0) -> list[Sample]:
    count = job.prompts * job.samples
    with stages.stage(f"generate {count} samples and a conversation: {what}"):
        samples = rollout.generate_groups(
            server, step, job.prompts, job.samples, job.new_tokens, job.seed
        )
        talk = rollout.generate_conversation(server, step, job.prompts, job.new_tokens // 2)
    return [*samples, talk]


def _train(
    job: Job, stages: Stages, what: str, mode: str, samples: list[Sample], **options: str | Path
) -> dict[str, Any]:
    """Runs the trainer's process on a rollout and returns the JSON it wrote."""
    saved, result = job.out / f"rollout-{mode}.json", job.out / f"trainer-{mode}.json"
    rollout.save(samples, saved)
    options = {"rollout": saved, "result": result, "seed": str(job.seed), **options}
    command = [
        *(sys.executable, "-m", "megatron_trace.launch", "--nproc-per-node", "1"),
        # torchrun's own default is one fixed port: two jobs on a host would meet there.
        *("--master-addr", "127.0.0.1", "--master-port", str(held_port())),
        *(str(Path(__file__).with_name("trainer.py")), mode),
        *(word for key, value in options.items() for word in (f"--{key}", str(value))),
    ]
    stages.process(f"Megatron-core: {what}", command, job.out / f"trainer-{mode}.log")
    answer: dict[str, Any] = read_json(result)
    return answer


def _main_job(job: Job, stages: Stages) -> dict[str, Any]:
    """Default capture, guided GRPO step, weights back to the running server, generate again."""
    with _serving(job, stages, "FP4, default capture", "main", CAPTURE) as server:
        sglang = server.version()
        first = _generate(job, stages, server, "first weights")
        step = _train(
            job,
            stages,
            "guided GRPO step",
            "step",
            first,
            model=job.model,
            save=job.updated_model,
            bridge=server.bridge,
        )
        with stages.stage("send the new weights to the running server"):
            server.update_weights(job.updated_model, "1")
        second = _generate(job, stages, server, "updated weights", step=1)
        after = _train(
            job,
            stages,
            "follow the second rollout",
            "check",
            second,
            model=job.updated_model,
            bridge=server.bridge,
        )
    return {"sglang": sglang, "first": first, "second": second, "step": step, "after": after}


def _comparison(job: Job, stages: Stages) -> dict[str, Any]:
    """The same checkpoint in BF16, and with every code word captured, under each way to round."""
    with _serving(job, stages, "BF16, no capture", "bf16", []) as server:
        bf16 = _generate(job, stages, server, "BF16")
    rollout.save(bf16, job.out / "rollout-bf16.json")
    with _serving(job, stages, "FP4, full code words", "full", FULL_CAPTURE) as server:
        full = _generate(job, stages, server, "full code words")
        compared = _train(
            job,
            stages,
            "every way to round",
            "compare",
            full,
            model=job.model,
            bridge=server.bridge,
            **{"bf16-rollout": job.out / "rollout-bf16.json"},
        )
    return {"full": full, "bf16": bf16, "compared": compared}
