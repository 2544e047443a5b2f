"""How far a Transformer Engine trainer is from a captured rollout on the same GPU.

Two commands, because a host may hold SGLang and Transformer Engine in different environments, and
a bridge that runs meanwhile:

  python -m bridge serve --endpoint tcp://127.0.0.1:7707
  python -m benchmarks.rollout_gap rollout RUN     samples from a `trace_fp4` server, whole codes
  python -m benchmarks.rollout_gap trainer RUN     the same tokens in Megatron-core, every rounding

Log-probability gaps are those of sampled tokens, in nats; agreement is of code words, where the
records hold them whole.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.command_line import command_line
from benchmarks.gpu_timing import git_commit
from benchmarks.rollout_gap.model import CONFIG, write_checkpoint
from bridge.layout import Site, deeper_half

app = typer.Typer(help=__doc__, no_args_is_help=True)

LAYERS = CONFIG["num_hidden_layers"]
PROMPTS, SAMPLES, PROMPT, NEW = 8, 4, 64, 192
MICRO_BATCH = 8
PAPER = (Site.FC1, Site.K, Site.V, Site.ROUTES)
Bridge = Annotated[str, typer.Option(help="Endpoint of the running bridge.")]
Run = Annotated[Path, typer.Argument(help="Folder for the checkpoint, samples and result.")]
DEFAULT_BRIDGE = "tcp://127.0.0.1:7707"


@app.command()
def rollout(run: Run, bridge: Bridge = DEFAULT_BRIDGE) -> None:
    """Sample from a server that captures every site of every layer with whole code words."""
    from examples.demo.server import Server

    model = write_checkpoint(run / "model")
    flags = [
        *("--skip-tokenizer-init", "--sampling-backend", "pytorch", "--weight-version", "1"),
        *("--max-total-tokens", "60000", "--max-running-requests", "64"),
        *("--disable-prefill-cuda-graph", "--quantization", "trace_nvfp4"),
        *("--attention-backend", "trace_fp4", "--kv-cache-dtype", "nvfp4"),
        *("--trace-capture", "--trace-bridge", bridge, "--trace-bits", "4"),
        *("--trace-sites", "fc1,fc2,k,v,routes", "--trace-layers", "all"),
    ]
    server = Server(model, run / "server.log", flags)
    server.start()
    try:
        (run / "samples.json").write_text(json.dumps(_samples(server)))
    finally:
        server.stop()


def _samples(server: Any) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, CONFIG["vocab_size"], (PROMPTS, PROMPT), generator=generator)
    inputs = [row for row in prompts.tolist() for _ in range(SAMPLES)]
    names = [f"prompt{i // SAMPLES}/{i % SAMPLES}" for i in range(len(inputs))]
    replies = server.post(
        "/generate",
        {
            "input_ids": inputs,
            "rid": names,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": NEW, "ignore_eos": True},
            "return_logprob": True,
        },
    )
    drawn = [reply["meta_info"]["output_token_logprobs"] for reply in replies]
    return [
        {
            "name": name,
            "tokens": prompt + [token for _, token, _ in tokens],
            "logprobs": [logprob for logprob, _, _ in tokens],
        }
        for name, prompt, tokens in zip(names, inputs, drawn, strict=True)
    ]


@app.command()
def trainer(
    run: Run,
    bridge: Bridge = DEFAULT_BRIDGE,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Compute the sampled tokens in Megatron-core with Transformer Engine, in every rounding."""
    from bridge.client.client import TraceClient

    samples = json.loads((run / "samples.json").read_text())
    model = _te_model(run / "model")
    with TraceClient(bridge) as client:
        fetched = client.fetch_all([sample["name"] for sample in samples])
        records = {record.trajectory: record for record in fetched}
        rows = [
            {"variant": name, **_gap(model, samples, records, guidance)}
            for name, guidance in _variants().items()
        ]
    for row in rows:
        print(json.dumps(row), flush=True)
    found = {
        "name": "rollout_gap",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "command": command_line("benchmarks.rollout_gap"),
        "device": torch.cuda.get_device_name(),
        "model": CONFIG,
        "rows": rows,
    }
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def _te_model(checkpoint: Path) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from benchmarks.trainer_step.model import start_one_rank
    from megatron_trace.hf import build_model, load_hf, transformer_config

    start_one_rank()
    config = transformer_config(
        CONFIG,
        params_dtype=torch.bfloat16,
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        bias_activation_fusion=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = build_model(CONFIG, config, spec=spec)
    load_hf(model, checkpoint)
    return model.cuda().eval()


def _variants() -> dict[str, Any]:
    """None computes BF16; the others FP4 under this guidance."""
    from megatron_trace import Guidance

    half = tuple(deeper_half(LAYERS))
    return {
        "bf16": None,
        "nearest, own routes": Guidance(sites=(), compare=True),
        "nearest": Guidance(sites=(Site.ROUTES,), compare=True),
        "guided, 1 bit, deeper half": Guidance(bits=1, layers=half, sites=PAPER, compare=True),
        "guided, 1 bit, all layers": Guidance(bits=1, sites=PAPER, compare=True),
        "guided, 1 bit, all layers, fc2": Guidance(bits=1, compare=True),
        "guided, whole code words, fc2": Guidance(bits=4, compare=True),
    }


@torch.no_grad()
def _gap(
    model: Any, samples: list[dict[str, Any]], records: dict[str, Any], guidance: Any
) -> dict[str, Any]:
    from megatron_trace import (
        GuidedMicroBatch,
        LogProbGap,
        disable_fp4,
        enable_fp4,
        guide,
        token_logprobs,
    )
    from megatron_trace.telemetry.report import Report

    disable_fp4(model)
    if guidance is not None:
        enable_fp4(model)
    gap, report = LogProbGap(), Report({})
    for first in range(0, len(samples), MICRO_BATCH):
        chosen = samples[first : first + MICRO_BATCH]
        tokens = torch.tensor([sample["tokens"] for sample in chosen])
        batch = None
        if guidance is not None:
            batch = GuidedMicroBatch.from_records(
                [records[sample["name"]] for sample in chosen],
                tokens,
                weight_version="1",
                guidance=guidance,
                device="cuda",
            )
        here = tokens.cuda()
        positions = torch.arange(here.shape[1], device="cuda").expand_as(here)
        with nullcontext() if batch is None else guide(batch):
            logits = model(here, positions, None)
        ours = token_logprobs(logits, here.roll(-1, 1))[:, PROMPT - 1 : -1]
        theirs = torch.tensor([sample["logprobs"] for sample in chosen])
        gap.add(ours, theirs, torch.ones_like(theirs, dtype=torch.bool))
        report += Report({}) if batch is None else batch.report()
    found = gap.summary().to_dict()
    sites = set(Site) - {Site.ROUTES}
    agreement = {str(site): report.total([site]).agreement_used for site in sorted(sites)}
    total = report.total()
    return {
        **found,
        "agreement": total.agreement_used,
        "agreement_nearest": total.agreement_nearest,
        "adjacent_share": total.adjacent_share,
        "missing": total.missing,
        "agreement_by_site": agreement,
    }


if __name__ == "__main__":
    app()
