"""Which request goes on where another one ended, and which begins its trajectory anew."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.transport.bridge_sharding import shard_of
from sglang_trace.requests.rollouts import NAMES_KEPT, Rollouts
from sglang_trace.requests.unrecorded import Reason, Unrecorded


def request(rid: str, prompt: list[int], **more: Any) -> Any:
    return SimpleNamespace(rid=rid, origin_input_ids=prompt, **more)


def run(rollouts: Rollouts, rid: str, prompt: list[int], sampled: list[int]) -> bool:
    """Run a request to its end; returns whether it continued its trajectory."""
    rollout = rollouts.of(request(rid, prompt))
    tokens = array("i", [*prompt, *sampled])
    rollouts.sent(rollout, tokens.tobytes(), len(tokens), sampled=bool(sampled))
    return rollout.continues


def test_a_request_keeps_its_state_and_another_one_of_its_id_has_its_own() -> None:
    rollouts = Rollouts()
    first, second = request("t", [1]), request("t", [1])
    assert rollouts.of(first) is rollouts.of(first)
    assert (rollouts.of(first).number, rollouts.of(second).number) == (1, 2)


def test_the_same_prompt_again_is_another_rollout() -> None:
    rollouts = Rollouts()
    assert [run(rollouts, "t", [1, 2], [3, 4]) for _ in range(2)] == [False, False]


def test_a_prompt_that_begins_with_all_tokens_goes_on() -> None:
    """An aborted request that is resumed with what it had sampled, then the next turn."""
    rollouts = Rollouts()
    assert not run(rollouts, "t", [1, 2], [3, 4])
    assert run(rollouts, "t", [1, 2, 3, 4], [5])
    assert run(rollouts, "t", [1, 2, 3, 4, 5, 6, 7], [8])
    assert not run(rollouts, "t", [1, 2, 3, 4, 9], [8])
    # Nor does an older state of it.
    assert not run(rollouts, "t", [1, 2, 3, 4, 5], [8])


def test_a_request_that_sampled_nothing_is_begun_again() -> None:
    rollouts = Rollouts()
    run(rollouts, "t", [1, 2], [])
    assert not run(rollouts, "t", [1, 2], [3])


def test_what_began_anew_is_not_gone_on_with_from_the_old_tokens() -> None:
    rollouts = Rollouts()
    run(rollouts, "t", [1, 2], [3])
    rollouts.of(request("t", [1, 2]))
    assert not rollouts.of(request("t", [1, 2, 3])).continues


def test_an_older_request_that_ends_late_does_not_count() -> None:
    rollouts = Rollouts()
    late = rollouts.of(request("t", [1]))
    run(rollouts, "t", [5], [6])
    rollouts.sent(late, array("i", [1, 2]).tobytes(), 2, sampled=True)
    assert not rollouts.of(request("t", [1, 2, 3])).continues


@pytest.mark.parametrize("first", ["t", "t#", "t#0", "t#1"])
def test_a_later_turn_goes_on_whatever_its_prompt_is(first: str) -> None:
    rollouts = Rollouts()
    assert not run(rollouts, first, [1, 2], [3])
    # A chat template may write the earlier turns in another way.
    assert run(rollouts, "t#2", [1, 2, 9, 9], [3])
    assert run(rollouts, "t#turn3", [1, 2, 9, 8, 7], [3])


def test_a_turn_that_is_used_again_begins_the_conversation_anew() -> None:
    rollouts = Rollouts()
    run(rollouts, "t#1", [1, 2], [3])
    run(rollouts, "t#2", [1, 2, 3, 4], [5])
    assert not run(rollouts, "t#2", [1, 2, 3, 4], [5])
    assert not run(rollouts, "t#1", [1, 2], [3])
    assert run(rollouts, "t#2", [1, 2, 4, 4], [5])


def test_a_later_turn_goes_on_with_what_another_engine_computed() -> None:
    assert run(Rollouts(), "t#2", [1, 2, 3], [4])


def test_names_are_remembered_in_bounded_memory() -> None:
    rollouts = Rollouts()
    for number in range(NAMES_KEPT + 10):
        rollouts.of(request(f"t{number}", []))
    assert len(rollouts._last) == NAMES_KEPT


def test_rows_go_to_the_trajectorys_bridge_and_the_servers_own_to_the_first() -> None:
    rollouts = Rollouts(3)
    assert {rollouts.of(request(f"t#{turn}", [])).shard for turn in range(4)} == {shard_of("t", 3)}
    own = rollouts.of(request("HEALTH_CHECK_1", []))
    assert (own.shard, own.trajectory, own.reason) == (0, None, None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"input_embeds": [[0.1]]}, Reason.EMBEDDINGS),
        ({"positional_embed_overrides": object()}, Reason.EMBEDDINGS),
        ({"multimodal_inputs": object()}, Reason.MULTIMODAL),
        ({"beam_group": object()}, Reason.BEAMS),
        ({"rid": "#2"}, Reason.NAMELESS),
    ],
)
def test_inputs_that_are_not_token_ids_are_not_recorded(
    more: dict[str, Any], reason: Reason
) -> None:
    req = request("t", [1, 1, 1])
    for name, value in more.items():
        setattr(req, name, value)
    rollout = Rollouts().of(req)
    assert (rollout.trajectory, rollout.reason) == (None, reason)


def test_the_log_says_the_first_tenth_and_hundredth(caplog: pytest.LogCaptureFixture) -> None:
    unrecorded = Unrecorded()
    for number in range(120):
        unrecorded.count(f"r{number}", Reason.EMBEDDINGS)
    unrecorded.count("other", Reason.BEAMS)
    assert [record.getMessage().split("'")[1] for record in caplog.records] == [
        *("r0", "r9", "r99"),
        "other",
    ]
    unrecorded.summarize()
    assert caplog.records[-2].getMessage().startswith("120 requests were not recorded")
