"""`enable_fp4` marks all of a model or nothing, and dense models too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_rollout import Weights
from torch import Tensor

from bridge.fp4.nvfp4 import quantize_nvfp4
from bridge.layout import ModelShape, Part, RecordLayout, Site

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(6, 4)


@pytest.mark.parametrize("enabled_before", [False, True])
def test_a_refused_model_stays_as_it_was(
    lib: Any, build: Callable[..., Any], sequences: Any, enabled_before: bool
) -> None:
    from megatron_trace import enable_fp4
    from megatron_trace.preflight.unsupported import UnsupportedModel

    model = build()
    if enabled_before:
        enable_fp4(model)
    before = lib.packed_logits(model, sequences, None)
    attention = model.decoder.layers[3].self_attention
    kind = type(attention)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    attention.__class__ = type("Other", (kind,), {"forward": forward})
    with pytest.raises(UnsupportedModel):
        enable_fp4(model)
    assert torch.equal(lib.packed_logits(model, sequences, None), before)


def test_the_last_configuration_holds(lib: Any, build: Callable[..., Any], sequences: Any) -> None:
    from megatron_trace import TraceTrainerConfig, disable_fp4, enable_fp4

    model = build()
    plain = lib.packed_logits(model, sequences, None)
    keys = TraceTrainerConfig(experts=False)
    enable_fp4(model, keys)
    only_keys = lib.packed_logits(model, sequences, None)
    enable_fp4(model)
    everything = lib.packed_logits(model, sequences, None)
    enable_fp4(model, keys)
    assert torch.equal(lib.packed_logits(model, sequences, None), only_keys)
    assert not torch.equal(everything, only_keys)
    assert not torch.equal(only_keys, plain)
    disable_fp4(model)
    assert torch.equal(lib.packed_logits(model, sequences, None), plain)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_every_chunk_of_a_list_is_marked(lib: Any, build: Callable[..., Any]) -> None:
    from megatron_trace import disable_fp4, enable_fp4

    chunks = [build(), build()]
    enable_fp4(chunks)
    for chunk in chunks:
        assert all("trace_experts" in layer.mlp.__dict__ for layer in chunk.decoder.layers)
    chunks[1].decoder.layers[0].mlp.experts = torch.nn.Identity()
    disable_fp4(chunks[:1])
    with pytest.raises(Exception, match="TEGroupedMLP"):
        enable_fp4(chunks)
    assert not any("trace_experts" in layer.mlp.__dict__ for layer in chunks[0].decoder.layers)


# --- without experts


DENSE = ModelShape(
    num_layers=2,
    hidden_size=64,
    moe_intermediate_size=0,
    num_experts=0,
    top_k=0,
    num_kv_heads=2,
    head_dim=32,
    moe_layers=(),
    attention_layers=(0, 1),
)


@pytest.fixture
def dense(one_rank: None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        kv_channels=32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 96, 64)
    return model.eval()


def dense_records(keys: dict[int, Tensor], values: dict[int, Tensor], like: Any) -> Any:
    """Return records of a dense rollout whose K and V [T, G * D] of each layer were these."""
    layout = RecordLayout(DENSE, (0, 1), (Site.K, Site.V), bits=4)
    length = len(like.tokens)
    rows = torch.zeros(length, layout.row_bytes(Part.KV), dtype=torch.uint8)
    for layer in (0, 1):
        for site, states in ((Site.K, keys[layer]), (Site.V, values[layer])):
            fp4 = quantize_nvfp4(states, torch.ones(()))
            layout.write_site(rows, site, layer, fp4.codes_u8, fp4.scales_u8)
    return replace(
        like,
        layout=layout,
        kv=rows,
        kv_valid=torch.ones(length, dtype=torch.bool),
        forward=torch.zeros(length, 0, dtype=torch.uint8),
        forward_valid=torch.zeros(length, dtype=torch.bool),
        kv_scales={},
    )


@pytest.mark.parametrize("config", [{}, {"experts": False}])
def test_keys_and_values_of_a_dense_model_follow_their_records(
    lib: Any, dense: Any, weights: Weights, config: dict[str, bool]
) -> None:
    from megatron_trace import TraceTrainerConfig, enable_fp4
    from megatron_trace.layers.key_values import KeyValues

    sequence = lib.random_sequences(8)
    (like,), _ = lib.roll_out(weights, sequence)
    enable_fp4(dense, TraceTrainerConfig(**config))
    seen: dict[str, dict[int, Tensor]] = {"k": {}, "v": {}}
    with pytest.MonkeyPatch.context() as patch:
        rounded = KeyValues._rounded

        def noting(self: Any, site: Any, states: Any) -> Any:
            seen[site.value][self.layer] = states.detach().reshape(8, -1)
            return rounded(self, site, states)

        patch.setattr(KeyValues, "_rounded", noting)
        nearest = lib.padded_logits(dense, sequence, None)
    generator = torch.Generator().manual_seed(1)
    noise = {
        name: {
            layer: states * (1 + 0.05 * torch.randn(states.shape, generator=generator))
            for layer, states in table.items()
        }
        for name, table in seen.items()
    }
    records = [dense_records(noise["k"], noise["v"], like)]
    micro_batch = lib.padded(records, sequence, compare=True)
    guided = lib.padded_logits(dense, sequence, micro_batch)
    total = micro_batch.report().total()
    assert total.guided == total.compared == 8 * 2 * 2 * 64
    assert total.agree_used > 0.9 * total.compared > total.agree_nearest
    assert not torch.equal(guided, nearest)


def test_a_shape_with_experts_and_no_moe_layer_is_refused() -> None:
    with pytest.raises(Exception, match="name its MoE layers"):
        replace(DENSE, num_experts=8, top_k=2, moe_intermediate_size=32)
