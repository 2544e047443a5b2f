"""What a plain SGLang server answers: tokens and log-probabilities, to the last bit.

Requests go out one after the other, or several in one message, which the scheduler takes together:
which requests share a forward is then the same in every run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from bridge.transport.ports import held_port
from scripts.unchanged.measured import Failed, Measured
from scripts.unchanged.sites import Site
from scripts.unchanged.stand_in import make_stand_in

START_TIMEOUT_S, REQUEST_TIMEOUT_S = 240, 120
CHUNK_TOKENS = 64
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
    *("--max-total-tokens", "4096", "--max-running-requests", "8", "--random-seed", "1"),
    *("--chunked-prefill-size", str(CHUNK_TOKENS), "--sleep-on-idle"),
]
Answer = dict[str, Any]


def prompt(seed: int, tokens: int) -> list[int]:
    """Ids of printable bytes of the small model's tokenizer, different for every seed."""
    return [33 + (seed * 31 + i * i * 7 + i * seed) % 90 for i in range(tokens)]


PREFIX = prompt(1, 40)
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "sampling_seed": 11}
CACHED = "greedy, prefix from the cache"
# name -> prompts sent in one message, and sampling parameters
REQUESTS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "greedy": ([prompt(2, 30)], GREEDY),
    "greedy, prefix computed": ([PREFIX + prompt(3, 9)], GREEDY),
    CACHED: ([PREFIX + prompt(4, 13)], GREEDY),
    "greedy, prefill in chunks": ([prompt(5, 4 * CHUNK_TOKENS + 17)], GREEDY),
    "greedy, six at once": ([prompt(10 + i, 11 + 7 * i) for i in range(6)], GREEDY),
    "sampled with a seed": ([prompt(6, 25)], GREEDY | SAMPLED),
}


def measure(site: Site, model: Path, work: Path) -> list[Measured]:
    """Start the server of this copy, ask everything, stop it."""
    log = work / f"server-{site.directory.name}.log"
    with _serving(site, model, log) as url:
        return [
            _measured(name, _generate(url, prompts, sampling, len(PREFIX) * (name == CACHED)))
            for name, (prompts, sampling) in REQUESTS.items()
        ]


def _generate(
    url: str, prompts: list[list[int]], sampling: dict[str, Any], logprobs_from: int
) -> list[Answer]:
    """SGLang takes from the cache only what comes before the first wanted log-probability."""
    body: dict[str, Any] = {
        "input_ids": prompts,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": logprobs_from,
        "top_logprobs_num": 5,
    }
    reply = requests.post(f"{url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    reply.raise_for_status()
    answers: list[Answer] = reply.json()
    return answers


def _measured(name: str, answers: list[Answer]) -> Measured:
    values: dict[str, str] = {}
    for i, answer in enumerate(answers):
        meta = answer["meta_info"]
        values |= {f"{i} token {j}": str(token) for j, token in enumerate(answer["output_ids"])}
        values[f"{i} cached tokens"] = str(meta["cached_tokens"])
        values[f"{i} finish reason"] = str(meta["finish_reason"])
        for kind in ("input_token_logprobs", "output_token_logprobs"):
            for j, entry in enumerate(meta[kind]):
                values[f"{i} {kind} {j}"] = _exact(entry)
        for kind in ("input_top_logprobs", "output_top_logprobs"):
            for j, entries in enumerate(meta[kind]):
                for rank, entry in enumerate(entries or ()):
                    values[f"{i} {kind} {j} rank {rank}"] = _exact(entry)
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    if name == CACHED and not cached:
        raise Failed("the server took no prefix from its cache: the comparison would miss it.")
    return Measured(name, values, f"{tokens} tokens, {cached} cached")


def _exact(entry: list[Any]) -> str:
    """Token id and log-probability [logprob or None, id, text] as an exact string."""
    logprob, token = entry[0], entry[1]
    return f"{token} {'none' if logprob is None else float(logprob).hex()}"


@contextmanager
def _serving(site: Site, model: Path, log: Path) -> Iterator[str]:
    stand_in = () if site.patched else (make_stand_in(log.parent / "stand_in"),)
    environment = site.environment(*stand_in)
    site.require_first(environment)
    port = held_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--nccl-port", str(held_port())],
            cwd=log.parent,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(process, url, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise Failed(f"the server did not start, see {log}:\n{log.read_text(errors='replace')[-1500:]}")
