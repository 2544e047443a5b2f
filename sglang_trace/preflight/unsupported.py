"""Options and models that capture does not support: the server refuses them at start.

When a combination works, remove its row.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from bridge.errors import TraceError
from bridge.layout import RecordLayout, Site
from sglang_trace.config import ATTENTION_BACKEND, KV_CACHE_DTYPE, QUANTIZATION, TraceConfig
from sglang_trace.preflight.server_options import (
    COPYING_CACHES,
    DIFFUSION,
    DISAGGREGATION,
    NO_PREFILL_GRAPH,
    PARALLEL,
    PDMUX,
    PREFILL_GRAPH,
    SPECULATION,
    TWO_BATCH_OVERLAP,
    Option,
    Unsupported,
    backends_of,
    count_above_one,
    listed,
    switch,
)

# The release with which capture has run on a GPU.
GPU_RELEASE = "0.5.17"
# The release with which capture has run on tensor-parallel ranks.
RANKS_RELEASE = "0.5.23"


class NotCaptured(TraceError):
    """A combination of options whose records would be wrong."""


_ONE_RANK = "its ranks' shares of a row are not captured"
_MOVES_SLOTS = "it moves K and V between slots behind the records"

UNSUPPORTED = (
    Unsupported(
        Option(
            "--device other than cpu and cuda",
            lambda options: options.device not in ("cpu", "cuda"),
        ),
        "the FP4 experts have no kernels for it",
        "serve with --device cuda or cpu",
    ),
    Unsupported(
        Option(
            "--tp-size above 1 with --device cuda",
            lambda options: options.tp_size > 1 and options.device == "cuda",
        ),
        "the FP4 kernels do not share a token's scale between ranks",
        "serve on one GPU",
    ),
    Unsupported(
        Option(
            f"--tp-size above 1 with another sglang than {RANKS_RELEASE}",
            lambda options: options.tp_size > 1 and version("sglang") != RANKS_RELEASE,
        ),
        "capture on several ranks has run with that release only",
        f"install sglang=={RANKS_RELEASE} or serve on one rank",
    ),
    Unsupported(
        Option(
            f"--device cuda with another sglang than {GPU_RELEASE}",
            lambda options: options.device == "cuda" and version("sglang") != GPU_RELEASE,
        ),
        "capture has run on a GPU with that release only",
        f"install sglang=={GPU_RELEASE} or serve with --device cpu",
    ),
    Unsupported(
        Option(
            "--moe-runner-backend",
            lambda options: options.moe_runner_backend not in ("auto", "triton"),
        ),
        "it hands routes on in a form of its own",
    ),
    Unsupported(count_above_one("ep_size"), _ONE_RANK),
    *(Unsupported(each, _ONE_RANK) for each in PARALLEL),
    Unsupported(count_above_one("moe_dp_size"), _ONE_RANK),
    Unsupported(
        switch("enable_attn_tp_input_scattered"),
        "a rank's experts may then see a part of the tokens",
    ),
    Unsupported(SPECULATION, "rejected drafts are computed rows that no token comes from"),
    *(Unsupported(each, _MOVES_SLOTS) for each in COPYING_CACHES),
    Unsupported(
        switch("enable_streaming_session"),
        "a session keeps its slots beyond the end of a request",
        "send the turns of one trajectory as rid NAME#1, NAME#2",
    ),
    Unsupported(DISAGGREGATION, "prompt and reply are computed by two engines"),
    Unsupported(TWO_BATCH_OVERLAP, "two half batches would write the same staging rows"),
    Unsupported(PDMUX, "a prefill is split over several passes"),
    Unsupported(DIFFUSION, "a diffusion model computes a token many times"),
    Unsupported(
        PREFILL_GRAPH,
        "its pieces are captured without the staging rows",
        NO_PREFILL_GRAPH,
    ),
    Unsupported(
        Option(
            "--enable-eplb",
            lambda options: options.enable_eplb or options.ep_num_redundant_experts > 0,
        ),
        "routes would name physical experts",
    ),
    Unsupported(
        Option("--enable-lora", lambda options: options.enable_lora or bool(options.lora_paths)),
        "the records do not say which adapter computed a row",
    ),
    Unsupported(switch("is_embedding"), "there are no sampled tokens"),
    Unsupported(
        switch("warmups"),
        "its requests have no names of their own and would be recorded as a client's",
    ),
    Unsupported(
        switch("enable_mis"),
        "items of one request do not see each other, which the trainer does not know",
    ),
    Unsupported(switch("use_ray"), "its workers do not inherit the trace options"),
    Unsupported(
        Option(
            "--enable-paged-experts",
            lambda options: (
                getattr(options, "enable_paged_experts", False) or bool(options.kt_weight_path)
            ),
        ),
        "it takes the place of the experts that record",
    ),
)

_KV_ON_A_GPU = Unsupported(
    Option(
        f"k and v with --device cuda and another attention than {ATTENTION_BACKEND}",
        lambda options: set(backends_of(options)) != {ATTENTION_BACKEND},
    ),
    "no other backend reads an NVFP4 KV cache in the way that is recorded",
    f"serve on a Hopper GPU with --attention-backend {ATTENTION_BACKEND} or add --trace-sites "
    "fc1,routes or fc1,fc2,routes",
)


def check_arguments(options: Any, config: TraceConfig) -> None:
    """Refuse what SGLang's resolved options rule out.

    Raises:
        NotCaptured: naming every reason found.
    """
    found = [row for row in UNSUPPORTED if row.applies(options)]
    wanted = set(config.sites)
    if {Site.FC1, Site.FC2} & wanted and options.quantization != QUANTIZATION:
        found.append(_needs("--quantization", options.quantization, QUANTIZATION, "fc1 and fc2"))
    if {Site.K, Site.V} & wanted and options.kv_cache_dtype != KV_CACHE_DTYPE:
        found.append(_needs("--kv-cache-dtype", options.kv_cache_dtype, KV_CACHE_DTYPE, "k and v"))
    if {Site.K, Site.V} & wanted and options.device == "cuda" and _KV_ON_A_GPU.applies(options):
        found.append(_KV_ON_A_GPU)
    if Site.ROUTES in wanted and options.quantization != QUANTIZATION:
        found.append(_needs("--quantization", options.quantization, QUANTIZATION, "routes"))
    if found:
        raise NotCaptured(listed(found))


def check_model(model_runner: Any, layout: RecordLayout) -> None:
    """Refuse what only the loaded model shows.

    Raises:
        NotCaptured: the model has no experts of ours, or keeps K and V elsewhere.
    """
    from sglang_trace.quantization.moe_method import moe_layers

    computed = {layer.layer_id for _name, layer, _method in moe_layers(model_runner.model)}
    recorded = {Site.FC1, Site.FC2, Site.ROUTES} & set(layout.sites)
    if recorded and computed != set(layout.shape.moe_layers):
        raise NotCaptured(
            f"The model's experts are in layers {layout.shape.moe_layers} and {QUANTIZATION} "
            f"computes those of {tuple(sorted(computed))}: use a mixture-of-experts model whose "
            "experts are not quantized in the checkpoint."
        )
    if {Site.K, Site.V} & set(layout.sites):
        _check_pool(model_runner)


def _check_pool(model_runner: Any) -> None:
    method = getattr(model_runner.token_to_kv_pool, "quant_method", None)
    if getattr(method, "name", None) != KV_CACHE_DTYPE or model_runner.is_hybrid_swa:
        raise NotCaptured(
            f"The model's KV cache is a {type(model_runner.token_to_kv_pool).__name__}, which is "
            "not read back (sliding windows, latent attention and hybrids are not yet): "
            "add --trace-sites fc1,routes."
        )


def _needs(flag: str, found: str | None, needed: str, sites: str) -> Unsupported:
    return Unsupported(
        Option(f"{flag} {found}", lambda _options: True),
        f"{sites} are recorded with {flag} {needed}",
        f"leave {flag} out or change --trace-sites",
    )
