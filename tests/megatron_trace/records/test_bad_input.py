"""What is refused, each with one sentence that names the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.errors import TokenMismatch, TraceError, WeightVersionMismatch
from bridge.layout import RecordLayout, Site
from bridge.layout.tensor_slice import ALL_VALUES

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(6, 4)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> list[Any]:
    return lib.roll_out(weights, sequences)[0]


def assert_one_sentence(error: pytest.ExceptionInfo[TraceError]) -> None:
    sentence = str(error.value)
    assert "\n" not in sentence
    assert sentence.endswith(".")


# --- records


def test_rows_of_other_weights_are_refused(lib: Any, sequences: Any, records: Any) -> None:
    with pytest.raises(WeightVersionMismatch, match=r"'1'.*trainer holds '2'") as error:
        lib.packed(records, sequences, version="2")
    assert_one_sentence(error)


@pytest.mark.parametrize(
    ("trainer", "lag", "accepted"),
    [
        ("1", 0, True),
        ("2", 0, False),
        ("2", 1, True),
        ("3", 1, False),
        ("0", 5, False),
        ("default", 5, False),
        (None, 0, True),
    ],
)
def test_a_weight_version_may_lag_as_far_as_allowed(
    lib: Any, sequences: Any, records: Any, trainer: str | None, lag: int, accepted: bool
) -> None:
    from megatron_trace import Guidance, GuidedMicroBatch

    micro_batch = GuidedMicroBatch.from_records(
        records,
        torch.cat(sequences)[None],
        cu_seqlens=lib.cumulative_lengths(sequences),
        weight_version=trainer,
        max_version_lag=lag,
        guidance=Guidance(on_missing="round_to_nearest"),
    )
    states = set(micro_batch.rows.forward_state[lib.consumed(sequences)].tolist())
    assert states == ({2} if accepted else {1})


@pytest.mark.parametrize("version", ["1", None])
def test_one_version_of_two_different_weights_is_refused(
    lib: Any, sequences: Any, records: Any, version: str | None
) -> None:
    def of(*digests: str) -> list[Any]:
        return [replace(r, weights=(d,)) for r, d in zip(records, digests, strict=True)]

    with pytest.raises(WeightVersionMismatch, match=r"'t0' and 't1' .* both called '1'") as error:
        lib.packed(of("aa", "bb"), sequences, version=version)
    assert_one_sentence(error)
    for digests in (("aa", "aa"), ("aa", ""), ("", "bb")):
        assert lib.packed(of(*digests), sequences, version=version).num_tokens == 10


def test_other_tokens_are_refused(lib: Any, sequences: Any, records: Any) -> None:
    changed = sequences[1].clone()
    changed[2] += 1
    with pytest.raises(TokenMismatch, match=r"'t1'.*at position 2") as error:
        lib.packed(records, [sequences[0], changed])
    assert_one_sentence(error)


def test_a_missing_row_is_refused_unless_allowed(lib: Any, sequences: Any, records: Any) -> None:
    from megatron_trace.records.microbatch import MissingRecords

    hole = replace(records[0], kv_valid=torch.zeros(6, dtype=torch.bool))
    with pytest.raises(MissingRecords, match="5 of 10 tokens have no kv record") as error:
        lib.packed([hole, records[1]], sequences)
    assert_one_sentence(error)
    assert lib.packed([hole, records[1]], sequences, sites=(Site.FC1,)).num_tokens == 10
    with pytest.raises(MissingRecords):
        lib.packed([None, records[1]], sequences)


def test_only_what_guides_is_fetched_and_unknown_names_only_if_gaps_are_allowed(
    records: Any,
) -> None:
    from megatron_trace import Guidance, fetch_records

    asked: list[dict[str, Any]] = []
    held = dict(zip("ab", records, strict=True))

    def fetch_all(names: list[str], **choice: Any) -> list[Any]:
        asked.append(choice)
        return [held[name] for name in names]

    client: Any = SimpleNamespace(fetch_all=fetch_all)
    found = fetch_records(client, "ab", Guidance(layers=(2, 3), sites=(Site.FC2,)))
    assert all(ours is theirs for ours, theirs in zip(found, records, strict=True))
    fetch_records(client, "a", Guidance(compare=True, on_missing="round_to_nearest"))
    whole = {"tensor_slice": ALL_VALUES}
    assert asked == [
        {"layers": (2, 3), "sites": (Site.FC2, Site.ROUTES), "allow_unknown": False} | whole,
        {"layers": None, "sites": None, "allow_unknown": True} | whole,
    ]


def test_sequences_and_records_must_pair_up(lib: Any, sequences: Any, records: Any) -> None:
    from megatron_trace.records.aligned_rows import SequenceCountMismatch

    with pytest.raises(SequenceCountMismatch, match="1 records were passed for 2 sequences"):
        lib.packed(records[:1], sequences)


@pytest.mark.parametrize(
    "choice",
    [{"lengths": [6]}, {"lengths": [6, 9]}, {"cu_seqlens": [0, 6, 13]}, {"cu_seqlens": [0, 6, 4]}],
)
def test_lengths_must_fit_the_tokens(
    lib: Any, sequences: Any, records: Any, choice: dict[str, Any]
) -> None:
    from megatron_trace import GuidedMicroBatch
    from megatron_trace.records.token_placement import PlacementError

    with pytest.raises(PlacementError) as error:
        GuidedMicroBatch.from_records(records, lib.pad(sequences), weight_version="1", **choice)
    assert_one_sentence(error)


@pytest.mark.parametrize(
    ("bits", "sites", "choice", "sentence"),
    [
        (1, tuple(Site), {"bits": 2}, "the records hold 1"),
        (1, tuple(Site), {"compare": True}, "--trace-bits 4"),
        (4, tuple(Site), {"scale_bits": 4}, "hold 8: .* follow 8 or 2"),
        (4, (Site.FC2,), {}, "add routes"),
        (4, (Site.FC1,), {"sites": (Site.K,)}, "the record holds"),
        (4, tuple(Site), {"layers": (0,)}, "the record holds"),
    ],
)
def test_guidance_beyond_the_records_is_refused(
    lib: Any,
    weights: Weights,
    sequences: Any,
    bits: int,
    sites: tuple[Site, ...],
    choice: dict[str, Any],
    sentence: str,
) -> None:
    layout = RecordLayout(SHAPE, (2, 3), sites, bits)
    short_records, _ = lib.roll_out(weights, sequences, layout=layout)
    with pytest.raises(TraceError, match=sentence) as error:
        lib.packed(short_records, sequences, **choice)
    assert_one_sentence(error)


def test_whole_scales_cannot_be_followed_where_two_bits_were_recorded(
    lib: Any, weights: Weights, sequences: Any
) -> None:
    layout = RecordLayout(SHAPE, (2, 3), tuple(Site), 1, scale_bits=2)
    records, _ = lib.roll_out(weights, sequences, layout=layout)
    with pytest.raises(TraceError, match=r"the records hold 2: .*--trace-scale-bits 8") as error:
        lib.packed(records, sequences, scale_bits=8)
    assert_one_sentence(error)


def test_records_of_one_micro_batch_must_be_alike(lib: Any, sequences: Any, records: Any) -> None:
    from megatron_trace.records.guidance import GuidanceError

    other_layout = replace(records[1], layout=replace(records[1].layout, bits=3))
    with pytest.raises(GuidanceError, match="one layout"):
        lib.packed([records[0], other_layout], sequences)
    other_scales = replace(records[1], kv_scales={0: (0.5, 0.5)})
    with pytest.raises(GuidanceError, match="different K/V scales"):
        lib.packed([records[0], other_scales], sequences)


def test_records_of_another_model_are_refused_by_the_forward(
    lib: Any, build_fp4: Callable[..., Any], sequences: Any, records: Any
) -> None:
    from megatron_trace.records.guidance import GuidanceError

    micro_batch = lib.packed(records, sequences)
    micro_batch.layout = replace(micro_batch.layout, shape=replace(SHAPE, moe_intermediate_size=48))
    with pytest.raises(GuidanceError, match="moe_intermediate_size 48, the trainer's has 32"):
        lib.packed_logits(build_fp4(), sequences, micro_batch)


def test_a_forward_of_other_tokens_than_the_micro_batchs_is_refused(
    lib: Any, build_fp4: Callable[..., Any], sequences: Any, records: Any
) -> None:
    from megatron_trace.parallel import TokenCountMismatch

    with pytest.raises(TokenCountMismatch, match=r"computes 12 tokens.*describes 10"):
        lib.padded_logits(build_fp4(), sequences, lib.packed(records, sequences))


# --- models


UNSUPPORTED_SETTINGS = (
    ("multi_latent_attention", True, "plain attention"),
    ("experimental_attention_variant", "gated_delta_net", "plain attention"),
    ("use_transformer_engine_op_fuser", True, "use_transformer_engine_op_fuser=False"),
    ("overlap_moe_expert_parallel_comm", True, "overlap_moe_expert_parallel_comm"),
    ("moe_latent_size", 32, "moe_latent_size"),
    ("moe_expert_capacity_factor", 1.5, "moe_expert_capacity_factor"),
    ("moe_pad_expert_input_to_capacity", True, "padded routing"),
    ("moe_router_padding_for_quantization", True, "moe_router_padding_for_quantization"),
    ("moe_apply_probs_on_input", True, "moe_apply_probs_on_input"),
    ("moe_mlp_glu_interleave_size", 32, "moe_mlp_glu_interleave_size"),
    ("moe_router_load_balancing_type", "sinkhorn", "moe_router_load_balancing_type"),
    ("moe_enable_routing_replay", True, "moe_enable_routing_replay"),
    ("fp4", "e2m1", "unset fp8 and fp4"),
    ("fp8", "hybrid", "unset fp8 and fp4"),
    ("gtp_weight_remat_size", 2, "gtp_weight_remat_size and"),
    ("expert_gtp_weight_remat_size", 2, "expert_gtp_weight_remat_size to 1"),
    ("delay_wgrad_compute", True, "delay_wgrad_compute"),
    ("overlap_dispatch_backward_with_experts_wgrad", True, "with_experts_wgrad to False"),
    ("moe_single_grouped_weight", True, "moe_single_grouped_weight"),
    ("cpu_offloading", True, "cpu_offloading to False"),
    ("gradient_accumulation_fusion", True, "or use grouped experts"),
    ("cuda_graph_impl", "local", 'cuda_graph_impl="none"'),
)

# Options that Megatron-core 0.16 lacks.
NEWER_OPTIONS = {
    "use_transformer_engine_op_fuser",
    "moe_mlp_glu_interleave_size",
    "gtp_weight_remat_size",
    "expert_gtp_weight_remat_size",
    "overlap_dispatch_backward_with_experts_wgrad",
    "moe_single_grouped_weight",
}


@pytest.mark.parametrize(("setting", "value", "sentence"), UNSUPPORTED_SETTINGS)
def test_an_unsupported_setting_is_refused(
    build: Callable[..., Any], setting: str, value: Any, sentence: str
) -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    model = build()
    setattr(model.decoder.layers[0].config, setting, value)
    with pytest.raises(UnsupportedModel, match=sentence) as error:
        enable_fp4(model)
    assert_one_sentence(error)


def test_offloading_the_experts_saved_weights_is_refused(build: Callable[..., Any]) -> None:
    from megatron_trace import TraceTrainerConfig, enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    model = build()
    config = model.decoder.layers[0].config
    config.fine_grained_activation_offloading = True
    for modules in ([], ["core_attn", "moe_act"]):
        config.offload_modules = modules
        enable_fp4(model)
    config.offload_modules = ["core_attn", "expert_fc1"]
    with pytest.raises(UnsupportedModel, match="offload_modules") as error:
        enable_fp4(model)
    assert_one_sentence(error)
    enable_fp4(model, TraceTrainerConfig(experts=False))


def test_every_refused_setting_is_an_option_of_this_release_or_of_a_newer_one() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {field.name for field in fields(TransformerConfig)}
    absent = {setting for setting, _, _ in UNSUPPORTED_SETTINGS} - options
    assert absent in (set(), NEWER_OPTIONS)


def test_modules_that_do_not_run_the_hooked_functions_are_refused(
    build: Callable[..., Any],
) -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    def swap(module: Any) -> None:
        module.__class__ = type("Other", (type(module),), {"forward": lambda self, x: x})

    for pick in (
        lambda layer: layer.self_attention,
        lambda layer: layer.mlp.experts.local_experts[2],
        lambda layer: layer.mlp.experts.local_experts[2].linear_fc1,
        lambda layer: layer.mlp.experts.local_experts[2].linear_fc2,
    ):
        model = build()
        swap(pick(model.decoder.layers[1]))
        with pytest.raises(UnsupportedModel, match="is a Other") as error:
            enable_fp4(model)
        assert_one_sentence(error)


def test_experts_of_another_kind_are_refused(build: Callable[..., Any]) -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    model = build()
    model.decoder.layers[0].mlp.experts = torch.nn.Identity()
    with pytest.raises(UnsupportedModel, match="moe_grouped_gemm=False"):
        enable_fp4(model)


def test_a_model_that_numbers_its_layers_otherwise_is_refused(build: Callable[..., Any]) -> None:
    """As Megatron-core's HybridModel, which counts attention and experts apart."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    model = build()
    model.__class__ = type("HybridModel", (LanguageModule,), {})
    with pytest.raises(UnsupportedModel, match="HybridModel numbers its layers") as error:
        enable_fp4(model)
    assert_one_sentence(error)


def test_a_model_without_layers_is_refused() -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    with pytest.raises(UnsupportedModel, match="pass the Megatron model itself"):
        enable_fp4(torch.nn.Linear(2, 2))


def test_an_unpatched_function_is_refused(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the files are patched but something replaced a function at run time."""
    from megatron.core.transformer.mlp import MLP

    from megatron_trace import enable_fp4
    from megatron_trace.preflight.hook_check import UnpatchedMegatron

    model = build()
    monkeypatch.setattr(MLP, "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(UnpatchedMegatron, match="python -m patches apply megatron-core") as error:
        enable_fp4(model)
    assert_one_sentence(error)
