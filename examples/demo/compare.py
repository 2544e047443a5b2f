"""Every way to round in the trainer, against one rollout whose full code words were recorded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from bridge.client.client import TraceClient
from bridge.layout import Site, deeper_half
from examples.demo.low_scales import describe_scales
from examples.demo.policy import fetch, logprobs, micro_batch, packs
from examples.demo.rollout import Sample
from examples.demo.stages import report_progress
from megatron_trace import Guidance, LogProbGap, disable_fp4, enable_fp4
from megatron_trace.telemetry.report import Report

PAPER_SITES = (Site.FC1, Site.K, Site.V, Site.ROUTES)
ALL_SITES = tuple(Site)


def variants(num_layers: int) -> dict[str, Guidance]:
    """The rows of the comparison table that need FP4 in the trainer.

    All of them replay the rollout's routing but the first, which has no records at all in use.
    """
    half = tuple(deeper_half(num_layers))
    return {
        "rtn_own_routing": Guidance(sites=(), compare=True),
        "rtn": Guidance(sites=(Site.ROUTES,), compare=True),
        "guided_1bit_deeper_half": Guidance(bits=1, layers=half, sites=PAPER_SITES, compare=True),
        "guided_1bit_deeper_half_low_scales": Guidance(
            bits=1, scale_bits=2, layers=half, sites=PAPER_SITES, compare=True
        ),
        "guided_1bit_deeper_half_fc2": Guidance(bits=1, layers=half, sites=ALL_SITES, compare=True),
        "guided_1bit_all_layers": Guidance(bits=1, sites=PAPER_SITES, compare=True),
        "guided_1bit_all_layers_low_scales": Guidance(
            bits=1, scale_bits=2, sites=PAPER_SITES, compare=True
        ),
        "guided_1bit_all_layers_fc2": Guidance(bits=1, sites=ALL_SITES, compare=True),
        "guided_full_code": Guidance(bits=4, sites=ALL_SITES, compare=True),
    }


@torch.no_grad()
def compare(
    model: GPTModel, full: list[Sample], bf16: list[Sample], client: TraceClient
) -> dict[str, Any]:
    """Log-prob gaps and code agreement of every variant, and the gap of BF16 on both sides."""
    todo = [(pack, fetch(client, pack)) for pack in packs(full)]
    chosen = variants(model.config.num_layers)
    gaps = {"bf16": _bf16_gap(model, bf16).summary().to_dict()}
    agreement = {}
    enable_fp4(model)
    for done, (name, guidance) in enumerate(chosen.items()):
        report_progress(done, len(chosen))
        gap, report = LogProbGap(), Report({})
        for pack, records in todo:
            batch = micro_batch(records, pack, guidance, pack.samples[0].weight_version)
            gap.add(logprobs(model, pack, batch), pack.rollout_logprobs, pack.sampled)
            report += batch.report()
        gaps[name] = gap.summary().to_dict()
        agreement[name] = _agreement(report, guidance, model.config.num_layers)
    return {"logprob_gap": gaps, "agreement": agreement}


def _bf16_gap(model: GPTModel, samples: list[Sample]) -> LogProbGap:
    gap = LogProbGap()
    disable_fp4(model)
    for pack in packs(samples):
        gap.add(logprobs(model, pack, None), pack.rollout_logprobs, pack.sampled)
    return gap


def _agreement(report: Report, guidance: Guidance, num_layers: int) -> dict[str, Any]:
    """Agreement over the guided sites (every site where nothing is guided), and site by site."""
    sites = set(guidance.sites or ()) - {Site.ROUTES} or set(Site) - {Site.ROUTES}
    layers = guidance.layers or range(num_layers)
    total = report.total(sites, layers)
    by_site = {
        site: [
            asdict(report.total([site], [layer])) | {"layer": layer} for layer in range(num_layers)
        ]
        for site in sorted(set(Site) - {Site.ROUTES})
    }
    return {
        "used": total.agreement_used,
        "nearest": total.agreement_nearest,
        "adjacent_share_of_nearest_mismatches": total.adjacent_share,
        "compared": total.compared,
        "missing": total.missing,
        "scales": describe_scales(total),
        "by_site": by_site,
    }
