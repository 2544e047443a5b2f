"""What the capture benchmark reads from logs, and how its groups are kept apart."""

from __future__ import annotations

import pytest

from benchmarks.engine.capture_gpu import (
    GROUPS,
    WEIGHT_BITS,
    Interval,
    compare,
    expert_bytes,
    intervals,
    merged,
    random_tokens,
    rows_of,
    with_bytes,
)

LINE = (
    "Decode batch, #running-req: {batch}, #token: {tokens}, token usage: 0.30, cuda graph: True, "
    "gen throughput (token/s): {rate}, #queue-req: 0"
)


def log(batch: int, *steps: tuple[int, float]) -> str:
    lines = [
        LINE.format(batch=batch, tokens=tokens, rate=1000 * batch / ms) for tokens, ms in steps
    ]
    return "\n".join(["Prefill batch, #new-seq: 8", *lines])


def test_the_first_interval_after_a_prefill_is_left_out() -> None:
    found = intervals(log(8, (100, 90.0), (200, 10.0), (300, 11.0)))
    assert [(each.tokens, round(each.ms_per_step, 6)) for each in found] == [
        (200, 10.0),
        (300, 11.0),
    ]


def test_steps_are_compared_at_the_same_number_of_tokens() -> None:
    off = [Interval(8, 100, 10.0), Interval(8, 300, 20.0)]
    assert compare(off, [Interval(8, 200, 15.0)]) == pytest.approx(1.0)
    assert compare(off, [Interval(8, 200, 30.0)]) == pytest.approx(0.5)


def test_the_first_setting_is_the_base() -> None:
    logs = {
        "bf16 experts": log(8, (90, 99.0), (100, 20.0), (200, 20.0)),
        "fp4 experts": log(8, (90, 99.0), (100, 10.0), (200, 10.0)),
    }
    rows = rows_of(logs)
    assert [(row["setting"], row["throughput_ratio"]) for row in rows] == [
        ("bf16 experts", 1.0),
        ("fp4 experts", 2.0),
    ]
    assert rows[1]["tokens_per_s"] == pytest.approx(800)


def test_a_group_measured_again_replaces_only_its_own_rows() -> None:
    old = [{"group": "experts", "n": 1}, {"group": "kv", "n": 2}]
    assert merged(old, [{"group": "kv", "n": 3}]) == [
        {"group": "experts", "n": 1},
        {"group": "kv", "n": 3},
    ]


def test_bytes_of_the_experts_that_random_routes_use() -> None:
    one = 8 * 3 * 2048 * 768
    assert expert_bytes(1, 16, 48) == pytest.approx(48 * 2 * one)
    assert expert_bytes(1, 4.5, 48) / expert_bytes(1, 16, 48) == pytest.approx(4.5 / 16)
    # Never more than all of them.
    assert expert_bytes(10_000, 16, 1) == pytest.approx(128 / 8 * 2 * one)
    assert 100 < expert_bytes(32, 16, 1) / (2 * one / 8) < 128


def test_only_rows_of_experts_in_decode_say_what_they_read() -> None:
    assert "expert_bytes_if_routed_evenly" in with_bytes({"setting": "fp4 experts", "batch": 1}, 48)
    assert "expert_bytes_if_routed_evenly" not in with_bytes({"setting": "off", "batch": 1}, 48)
    assert "expert_bytes_if_routed_evenly" not in with_bytes({"setting": "fp4 experts"}, 48)
    assert set(WEIGHT_BITS) == set(GROUPS["experts"])


def test_settings_of_a_group_differ_in_what_is_compared_only() -> None:
    for settings in (GROUPS["capture"], GROUPS["kv"]):
        base, *others = settings.values()
        assert "--trace-capture" not in base
        for flags in others:
            assert flags[: len(base)] == base
            assert flags[len(base)] == "--trace-capture"


def test_a_seed_gives_the_same_prompts() -> None:
    assert random_tokens(2, 5, seed=1) == random_tokens(2, 5, seed=1)
    assert random_tokens(2, 5, seed=1) != random_tokens(2, 5, seed=2)
