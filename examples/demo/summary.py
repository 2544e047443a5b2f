"""The demo's report: what `report.json` says, put together from the stages' results."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from examples.demo.rollout import Sample

if TYPE_CHECKING:
    from examples.demo.pipeline import Job

INSTALLED = ("sglang-trace", "transformers")


def summarize(
    job: Job, main: dict[str, Any], comparison: dict[str, Any], seconds: dict[str, float]
) -> dict[str, Any]:
    """The report of a run; everything outside `run` is the same for the same seed.

    How many messages carry the rows depends on timing, and so do the store's own bytes.
    """
    step, after, compared = main["step"], main["after"], comparison["compared"]
    stored = [part["records"].pop("stored_bytes_per_token") for part in (step, after)]
    return {
        "run": {"seconds": seconds, "stored_bytes_per_token": stored[0]},
        # The upstreams' are those that the server's and the trainer's process say they imported.
        "versions": {"sglang": main["sglang"], **step["versions"]}
        | {name: version(name) for name in INSTALLED},
        "job": {
            "seed": job.seed,
            "prompts": job.prompts,
            "samples": job.samples,
            "new_tokens": job.new_tokens,
        },
        "rollout": _describe(main["first"]),
        "rollout_after_update": _describe(main["second"]),
        # Capture is a bystander: recording more must not change a single token or log-probability.
        "rollouts_equal_under_any_capture": main["first"] == comparison["full"],
        "records": step["records"],
        "records_after_update": after["records"],
        "weights_before_update": step["weights"],
        "weights_after_update": after["weights"],
        "grpo_step": {key: step[key] for key in ("loss", "grad_norm", "reward_mean")},
        "main_job_gap": {"before": step["logprob_gap"], "after": after["logprob_gap"]},
        "code_agreement": _code_agreement(compared["agreement"]),
        "scales_of_two_bits": {
            layers: compared["agreement"][f"guided_1bit_{layers}_low_scales"]["scales"]
            for layers in ("deeper_half", "all_layers")
        },
        "logprob_gap": compared["logprob_gap"],
        "agreement": compared["agreement"],
    }


def _code_agreement(agreement: dict[str, Any]) -> dict[str, float]:
    """The headline: captured sites at one bit, all layers, against round-to-nearest."""
    guided, rtn = agreement["guided_1bit_all_layers"], agreement["rtn"]
    half = agreement["guided_1bit_deeper_half"]
    return {
        "guided": guided["used"],
        "guided_deeper_half": half["used"],
        "rtn": rtn["used"],
        "adjacent_share_of_rtn_mismatches": rtn["adjacent_share_of_nearest_mismatches"],
    }


def _describe(samples: list[Sample]) -> dict[str, Any]:
    return {
        "trajectories": len(samples),
        "tokens": sum(len(s.tokens) for s in samples),
        "sampled_tokens": sum(sum(s.sampled) for s in samples),
        "cached_tokens": sum(s.cached_tokens for s in samples),
        "reward_mean": sum(s.reward for s in samples) / len(samples),
    }
