"""Guided rounding in the real patched model, against an independent rollout's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.errors import NonFiniteActivation
from bridge.layout import RecordLayout, Site
from bridge.layout.shape import deeper_half

# Megatron is imported by the fixtures' process group; helpers that need it come after.
pytestmark = pytest.mark.usefixtures("one_rank")

QUANTIZED = (Site.FC1, Site.FC2, Site.K, Site.V)
NOISE = 0.01
ROWS = 9 + 14 + 6 - 3  # every token but each sequence's last


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(9, 14, 6)


@pytest.fixture(scope="module")
def noisy(lib: Any, weights: Weights, sequences: list[Tensor]) -> tuple[Any, Tensor]:
    """Records and logits of a rollout whose values are 1 % off the trainer's."""
    records, logits = lib.roll_out(weights, sequences, NOISE)
    return records, torch.cat(logits)


@pytest.fixture(scope="module")
def model(build_fp4: Callable[..., Any]) -> Any:
    return build_fp4()


def test_round_to_nearest_is_the_rollouts_arithmetic(
    lib: Any, model: Any, weights: Weights, sequences: list[Tensor]
) -> None:
    records, logits = lib.roll_out(weights, sequences, noise=0.0)
    micro_batch = lib.packed(records, sequences, sites=(Site.ROUTES,), compare=True)
    out = lib.packed_logits(model, sequences, micro_batch)
    assert micro_batch.report().total().agreement_used == 1.0
    assert (out - torch.cat(logits)).abs().max() < 1e-4


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_guidance_gives_every_site_the_rollouts_code_words_where_nearest_does_not(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor], bits: int
) -> None:
    micro_batch = lib.packed(noisy[0], sequences, bits=bits, compare=True)
    lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    for site in QUANTIZED:
        count = report.total([site])
        assert count.missing == 0
        assert count.agreement_used >= 0.9999, site
        assert count.agreement_nearest < 0.985, site
        assert count.adjacent_share >= 0.99, site


@pytest.mark.parametrize("form", ["packed", "padded"])
def test_a_guided_forward_computes_the_rollouts_logits(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor], form: str
) -> None:
    records, logits = noisy
    known = lib.consumed(sequences)
    run = getattr(lib, f"{form}_logits")

    def gap(**guidance: Any) -> float:
        out = run(model, sequences, getattr(lib, form)(records, sequences, **guidance))
        return (out - logits)[known].abs().max().item()

    assert gap(bits=1) < 1e-4
    assert gap(sites=(Site.ROUTES,)) > 1e-2


@pytest.mark.parametrize("site", QUANTIZED)
def test_only_the_chosen_site_is_guided(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor], site: Site
) -> None:
    micro_batch = lib.packed(noisy[0], sequences, sites=(Site.ROUTES, site), compare=True)
    lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    # Layer 0 is fed by embeddings alone up to this site, so its values are close to the rollout's.
    assert report.total([site], [0]).agreement_used > report.total([site], [0]).agreement_nearest
    for other in QUANTIZED:
        guided = report.total([other]).guided
        slots = SHAPE.top_k if other is Site.FC2 else 1
        expected = ROWS * slots * SHAPE.num_layers * FULL_WIDTH[other] if other is site else 0
        assert guided == expected


FULL_WIDTH = {
    Site.FC1: SHAPE.hidden_size,
    Site.FC2: SHAPE.moe_intermediate_size,
    Site.K: SHAPE.num_kv_heads * SHAPE.head_dim,
    Site.V: SHAPE.num_kv_heads * SHAPE.head_dim,
}


def test_layers_outside_the_choice_are_rounded_to_nearest(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    deeper = deeper_half(SHAPE.num_layers)
    micro_batch = lib.packed(noisy[0], sequences, bits=1, layers=deeper, compare=True)
    lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    assert report.total(layers=set(range(SHAPE.num_layers)) - set(deeper)).guided == 0
    shallow = report.total(layers=[0])
    assert shallow.agree_used == shallow.agree_nearest < shallow.compared
    # The deeper layers are fed by values that already differ, so even guidance cannot follow all.
    guided = report.total(layers=deeper)
    assert guided.agreement_used > 0.9 > guided.agreement_nearest


def test_one_bit_of_a_full_record_guides_like_a_one_bit_record(
    lib: Any, model: Any, weights: Weights, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    deeper = deeper_half(SHAPE.num_layers)
    one_bit = RecordLayout(SHAPE, deeper, tuple(Site), bits=1)
    records, _ = lib.roll_out(weights, sequences, NOISE, one_bit)
    from_one = lib.packed_logits(model, sequences, lib.packed(records, sequences))
    from_full = lib.packed_logits(
        model, sequences, lib.packed(noisy[0], sequences, bits=1, layers=deeper)
    )
    assert torch.equal(from_one, from_full)


def test_packed_and_padded_batches_are_overridden_alike(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    as_packed = lib.packed(noisy[0], sequences, compare=True)
    as_padded = lib.padded(noisy[0], sequences, compare=True)
    packed_out = lib.packed_logits(model, sequences, as_packed)
    padded_out = lib.padded_logits(model, sequences, as_padded)
    assert (packed_out - padded_out)[lib.consumed(sequences)].abs().max() < 1e-4
    for key, count in as_packed.report().counts.items():
        other = as_padded.report().counts[key]
        assert (count.guided, count.missing, count.agree_used) == (
            other.guided,
            other.missing,
            other.agree_used,
        )


def test_padding_between_packed_sequences_is_skipped(
    lib: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    from megatron_trace import GuidedMicroBatch

    tokens = torch.cat([torch.nn.functional.pad(t, (0, 16 - len(t))) for t in sequences])
    with_gaps = GuidedMicroBatch.from_records(
        noisy[0],
        tokens[None],
        cu_seqlens=lib.cumulative_lengths(sequences),
        cu_seqlens_padded=[0, 16, 32, 48],
        weight_version="1",
    )
    dense = lib.packed(noisy[0], sequences)
    recorded = with_gaps.rows.forward_state == 2
    assert torch.equal(
        with_gaps.rows.forward_rows[recorded], dense.rows.forward_rows[lib.consumed(sequences)]
    )
    assert int(recorded.sum()) == ROWS


def test_missing_rows_are_rounded_to_nearest_and_counted(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    first, second, third = noisy[0]
    gap = replace(second, forward_valid=second.forward_valid & (torch.arange(14) != 4))
    micro_batch = lib.packed([first, gap, None], sequences, on_missing="round_to_nearest")
    out = lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    assert out.isfinite().all()
    layers, lost = SHAPE.num_layers, len(sequences[2])
    assert report.total([Site.FC1]).missing == layers * (1 + lost) * SHAPE.hidden_size
    assert report.total([Site.K]).missing == layers * lost * FULL_WIDTH[Site.K]
    assert report.total([Site.ROUTES]).missing == layers * (1 + lost) * SHAPE.top_k
    # The sequences do not attend to each other: the first one is guided as ever.
    complete = lib.packed_logits(model, sequences, lib.packed(noisy[0], sequences))
    assert torch.equal(out[: len(sequences[0])], complete[: len(sequences[0])])
    assert not torch.equal(out, complete)
    assert third is not None


def test_the_sampled_last_token_is_not_missing(
    lib: Any, model: Any, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    micro_batch = lib.packed(noisy[0], sequences)
    lib.packed_logits(model, sequences, micro_batch)
    report = micro_batch.report()
    assert report.total([Site.FC1]).guided == ROWS * SHAPE.num_layers * SHAPE.hidden_size
    assert report.total().missing == 0


def test_key_and_value_scales_of_the_engine_are_used(
    lib: Any, model: Any, weights: Weights, sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    scaled = [replace(r, kv_scales={0: (0.5, 1.0)}) for r in noisy[0]]
    micro_batch = lib.packed(scaled, sequences)
    assert micro_batch.kv_global_scale(Site.K, 0).item() == 0.5
    assert micro_batch.kv_global_scale(Site.V, 0).item() == 1.0
    assert micro_batch.kv_global_scale(Site.K, 1).item() == 1.0
    out = lib.packed_logits(model, sequences, micro_batch)
    plain = lib.packed_logits(model, sequences, lib.packed(noisy[0], sequences))
    assert not torch.equal(out, plain)


def test_a_non_finite_activation_is_reported_with_its_site(
    lib: Any, build_fp4: Callable[..., Any], sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    broken = build_fp4()
    with torch.no_grad():
        broken.decoder.layers[2].pre_mlp_layernorm.weight[3] = torch.nan
    micro_batch = lib.packed(noisy[0], sequences)
    lib.packed_logits(broken, sequences, micro_batch)
    with pytest.raises(NonFiniteActivation, match="fc1 of layer 2"):
        micro_batch.report()


def test_bfloat16_follows_one_bit(
    lib: Any, build: Callable[..., Any], sequences: list[Tensor], noisy: tuple[Any, Tensor]
) -> None:
    from megatron_trace import enable_fp4

    model = build(params_dtype=torch.bfloat16)
    enable_fp4(model)
    micro_batch = lib.packed(noisy[0], sequences, bits=1, compare=True)
    out = lib.packed_logits(model, sequences, micro_batch)
    assert out.dtype == torch.bfloat16
    total = micro_batch.report().total()
    assert total.agreement_used > 0.995 > total.agreement_nearest
