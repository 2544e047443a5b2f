"""What must hold in the report of every demo run, whatever its sizes and upstream versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Report = dict[str, Any]

EXPERT_MATRICES = 4 * 8 * 3
"""Layers x experts x projections of the small model."""


def one_bit_makes_the_trainer_round_as_the_rollout_did(report: Report) -> bool:
    code = report["code_agreement"]
    return bool(
        code["guided"] >= 0.999
        and code["guided"] > code["rtn"]
        and code["guided_deeper_half"] > code["rtn"]
    )


def guided_log_probabilities_are_closer_than_round_to_nearest(report: Report) -> bool:
    gap = report["logprob_gap"]
    return bool(
        gap["guided_1bit_all_layers"]["mean"] < gap["rtn"]["mean"]
        and gap["guided_1bit_all_layers"]["tokens"] == report["rollout"]["sampled_tokens"]
    )


def two_bits_of_a_scale_say_the_rollouts_scale(report: Report) -> bool:
    read = report["scales_of_two_bits"]["all_layers"]
    return bool(read["read"] > 0 and read["wrong_share"] <= 0.001)


def no_record_is_missing_before_or_after_the_update(report: Report) -> bool:
    before, after = report["records"], report["records_after_update"]
    return bool(before["missing"] == 0 and after["missing"] == 0 and before["guided_values"] > 0)


def stored_bytes_are_those_of_the_formula(report: Report) -> bool:
    records = report["records"]
    # Row numbers, checksums and keys: the same few bytes a row whatever the model's size.
    overhead = report["run"]["stored_bytes_per_token"] - records["bytes_per_token"]
    return bool(
        records["bytes_per_token"] == records["bytes_per_token_formula"] and 0 < overhead < 128
    )


def weights_are_equal_on_both_sides_before_and_after_the_update(report: Report) -> bool:
    equal = {"differing": 0, "matrices": EXPERT_MATRICES}
    return bool(report["weights_before_update"] == equal == report["weights_after_update"])


def the_step_has_a_gradient(report: Report) -> bool:
    return bool(report["grpo_step"]["grad_norm"] > 0)


def the_prefix_cache_was_hit(report: Report) -> bool:
    return bool(
        report["rollout"]["cached_tokens"] > 0
        and report["records"]["rows"] < report["rollout"]["tokens"] * 2
    )


def capture_does_not_change_the_rollout(report: Report) -> bool:
    return report["rollouts_equal_under_any_capture"] is True


REQUIREMENTS: dict[str, Callable[[Report], bool]] = {
    check.__name__.replace("_", " "): check
    for check in (
        one_bit_makes_the_trainer_round_as_the_rollout_did,
        guided_log_probabilities_are_closer_than_round_to_nearest,
        two_bits_of_a_scale_say_the_rollouts_scale,
        no_record_is_missing_before_or_after_the_update,
        stored_bytes_are_those_of_the_formula,
        weights_are_equal_on_both_sides_before_and_after_the_update,
        the_step_has_a_gradient,
        the_prefix_cache_was_hit,
        capture_does_not_change_the_rollout,
    )
}


def unmet(report: Report) -> Iterator[str]:
    """What does not hold in `report`."""
    return (f"does not hold: {name}" for name, holds in REQUIREMENTS.items() if not holds(report))
