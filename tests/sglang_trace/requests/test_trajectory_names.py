"""What the requests are called that SGLang derives from one, and which ids are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_trace import hooks
from sglang_trace.config import TraceConfig
from sglang_trace.requests.trajectory_names import (
    HEALTH_CHECK,
    WARM_UP,
    NameRefused,
    check_names,
    client_trajectory,
    is_own,
    name_of_sample,
    sample_name,
)


def normalized(rid: str | list[str], prompts: int = 1, samples: int = 1) -> Any:
    """A client's request as SGLang has normalized it."""
    return SimpleNamespace(rid=rid, batch_size=prompts, parallel_sample_num=samples)


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_7", WARM_UP, "#2", "", "n" * 1025, "\ud800"])
def test_requests_that_are_no_trajectory(rid: str) -> None:
    assert client_trajectory(rid) is None


def test_turns_belong_to_the_trajectory_before_the_mark() -> None:
    assert client_trajectory("group-3/sample-1#turn2") == "group-3/sample-1"


def test_a_sample_of_a_turn_is_a_trajectory_of_its_own() -> None:
    assert sample_name("t#2", 1) == "t/1#2"
    assert client_trajectory(sample_name("t#2", 1)) == "t/1"


@pytest.mark.parametrize(
    ("rid", "prompts", "expected"),
    [
        # One prompt: releases before and after 0.5.20 normalize the id differently.
        (["grp"], 1, ["grp/0", "grp/1"]),
        (["grp_0", "grp_1"], 1, ["grp/0", "grp/1"]),
        (["grp#3_0", "grp#3_1"], 1, ["grp/0#3", "grp/1#3"]),
        # One id for two prompts.
        (["grp_0", "grp_1", "grp_2", "grp_3"], 2, ["grp_0/0", "grp_0/1", "grp_1/0", "grp_1/1"]),
        # An id for each prompt.
        (["a", "b_0"], 2, ["a/0", "a/1", "b_0/0", "b_0/1"]),
    ],
)
def test_samples_are_called_after_their_prompt(
    rid: list[str], prompts: int, expected: list[str]
) -> None:
    request = normalized(rid, prompts, samples=2)
    assert [name_of_sample(request, number) for number in range(2 * prompts)] == expected


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (normalized(""), "names no trajectory"),
        (normalized("#2"), "names no trajectory"),
        (normalized(["#2_0", "#2_1"], samples=2), "names no trajectory"),
        (normalized("n" * 1025), "send a shorter rid"),
        (normalized(["n" * 1023], samples=2), "send a shorter rid"),
        (normalized("\ud800"), "not valid Unicode"),
        (normalized(["t#2_0", "t#2_1"], prompts=2), "would extend one trajectory"),
        (normalized(["t#1", "t#2"], prompts=2), "would extend one trajectory"),
    ],
)
def test_ids_that_no_record_can_have_are_refused(request_: Any, sentence: str) -> None:
    with pytest.raises(NameRefused, match=sentence) as refused:
        check_names(request_)
    assert isinstance(refused.value, ValueError), "which SGLang answers with status 400"


@pytest.mark.parametrize(
    "request_",
    [
        normalized("n" * 1024),
        normalized("a/b c/ü#2"),
        normalized(f"{HEALTH_CHECK}_1"),
        normalized(["t_0", "t_1"], prompts=2),
        normalized(["t_0", "t_1"], samples=2),
        # Requests for embeddings are not sampled.
        SimpleNamespace(rid="t", batch_size=1),
    ],
)
def test_other_ids_are_taken(request_: Any) -> None:
    check_names(request_)


def test_the_request_that_fills_the_prefix_cache_is_the_servers_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, value = TraceConfig("tcp://127.0.0.1:1").to_environment().popitem()
    monkeypatch.setenv(name, value)
    request = normalized("random")
    first, second = hooks.name_prefix(request), hooks.name_prefix(request)
    assert first != second == request.rid
    assert is_own(first)
    assert client_trajectory(first) is None


def test_without_capture_ids_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_TRACE", raising=False)
    request = normalized("random")
    hooks.on_names(normalized(""))
    assert hooks.name_prefix(request) == "random"
    assert hooks.name_sample(request, normalized("t", samples=2), 1) == "random"
