"""A GRPO-shaped batch: groups of samples over shared prompts, and one multi-turn conversation."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.demo.server import Server

# Every prompt starts with these lines, so that most of it comes from the prefix cache.
FEW_SHOT = "Q: 12 + 30 = ?\nA: 42\nQ: 7 * 8 = ?\nA: 56\n"
TOOL_REPLY = "\n[tool] the calculator says 99\nA:"


@dataclass(frozen=True)
class Sample:
    """One trajectory: tokens, who sampled them, and the rollout's log-probabilities.

    `sampled[i]` says that `tokens[i]` was drawn by the policy (not prompt, not tool output);
    `logprobs[i]` is its log-probability in the rollout and 0 elsewhere.
    """

    trajectory: str
    group: int
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    reward: float
    cached_tokens: int
    weight_version: str


def prompts(count: int, seed: int) -> list[str]:
    """`count` arithmetic questions behind one few-shot prefix."""
    numbers = [(seed + 3 + 7 * i) % 97 for i in range(count)]
    return [f"{FEW_SHOT}Q: {n} + {n + i} = ?\nA:" for i, n in enumerate(numbers)]


def reward_of(text: str) -> float:
    """Share of characters that are digits or spaces: something a random policy can improve on."""
    return sum(c.isdigit() or c == " " for c in text) / max(len(text), 1)


def _generate(server: Server, texts: list[str], rids: list[str], new: int) -> list[dict[str, Any]]:
    body = {
        "text": texts,
        "rid": rids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": True,
        "return_prompt_token_ids": True,
    }
    reply: list[dict[str, Any]] = server.post("/generate", body)
    return reply


def _sample(trajectory: str, group: int, turns: list[dict[str, Any]], version: str) -> Sample:
    """Joins the turns of one trajectory: the last turn's prompt holds everything before it."""
    tokens, sampled, logprobs = [], [], []
    for turn in turns:
        prompt = turn["prompt_token_ids"][len(tokens) :]
        drawn = turn["meta_info"]["output_token_logprobs"]
        tokens += prompt + [token for _, token, _ in drawn]
        sampled += [False] * len(prompt) + [True] * len(drawn)
        logprobs += [0.0] * len(prompt) + [logprob for logprob, _, _ in drawn]
    return Sample(
        trajectory=trajectory,
        group=group,
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        reward=reward_of("".join(turn["text"] for turn in turns)),
        cached_tokens=sum(turn["meta_info"]["cached_tokens"] for turn in turns),
        weight_version=version,
    )


def generate_groups(
    server: Server, step: int, count: int, samples: int, new_tokens: int, seed: int
) -> list[Sample]:
    """`count` prompts x `samples` each, as one request: the schedule is the same every time."""
    texts = [p for p in prompts(count, seed) for _ in range(samples)]
    rids = [f"step{step}/prompt{i:02d}/{j}" for i in range(count) for j in range(samples)]
    replies = _generate(server, texts, rids, new_tokens)
    return [
        _sample(rid, i // samples, [reply], str(step))
        for i, (rid, reply) in enumerate(zip(rids, replies, strict=True))
    ]


def generate_conversation(server: Server, step: int, group: int, new_tokens: int) -> Sample:
    """Two turns of one trajectory: the second request carries the first one's text and name."""
    name, text = f"step{step}/conversation", FEW_SHOT + "Q: 50 + 49 = ?\nA:"
    first = _generate(server, [text], [f"{name}#turn1"], new_tokens)[0]
    history = first["prompt_token_ids"] + first["output_ids"]
    tool = server.post("/tokenize", {"prompt": TOOL_REPLY, "add_special_tokens": False})
    body = {
        "input_ids": history + tool["tokens"],
        "rid": f"{name}#turn2",
        "sampling_params": {"temperature": 1.0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    second = server.post("/generate", body)
    second["prompt_token_ids"] = body["input_ids"]
    return _sample(name, group, [first, second], str(step))


def save(samples: list[Sample], path: Path) -> None:
    """One JSON file a rollout, read by the trainer process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(s) for s in samples]))


def load(path: Path) -> list[Sample]:
    """The samples `save` wrote."""
    return [Sample(**s) for s in json.loads(path.read_text())]
