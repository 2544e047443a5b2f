"""A micro-batch whose records nothing asks for is an error, not a report of zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_rollout import Weights
from torch import Tensor

from bridge.layout import Site

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    return lib.random_sequences(6, 4)


@pytest.fixture(scope="module")
def records(lib: Any, weights: Weights, sequences: list[Tensor]) -> Any:
    return lib.roll_out(weights, sequences)[0]


def test_a_model_that_was_never_marked_is_an_error(
    lib: Any, build: Callable[..., Any], sequences: Any, records: Any
) -> None:
    from megatron_trace.records.coverage import NothingGuided

    with pytest.raises(NothingGuided, match=r"call enable_fp4\(model\) before"):
        lib.packed_logits(build(), sequences, lib.packed(records, sequences))


def test_a_block_without_a_forward_is_an_error(lib: Any, sequences: Any, records: Any) -> None:
    from megatron_trace import guide
    from megatron_trace.records.coverage import NothingGuided

    with pytest.raises(NothingGuided), guide(lib.packed(records, sequences)):
        pass


@pytest.mark.parametrize(
    ("config", "sites"),
    [({"experts": False}, (Site.FC1,)), ({"kv_cache": False}, (Site.K, Site.V))],
)
def test_records_of_sites_that_stay_in_the_models_precision_are_an_error(
    lib: Any,
    build: Callable[..., Any],
    sequences: Any,
    records: Any,
    config: dict[str, bool],
    sites: tuple[Site, ...],
) -> None:
    from megatron_trace import TraceTrainerConfig, enable_fp4
    from megatron_trace.records.coverage import NothingGuided

    model = build()
    enable_fp4(model, TraceTrainerConfig(**config))
    with pytest.raises(NothingGuided, match="left them in the model's own precision"):
        lib.packed_logits(model, sequences, lib.packed(records, sequences, sites=sites))
    lib.packed_logits(model, sequences, lib.packed(records, sequences))  # some of all sites


def test_a_forward_that_fails_keeps_its_own_error(lib: Any, sequences: Any, records: Any) -> None:
    from megatron_trace import guide

    with pytest.raises(ZeroDivisionError), guide(lib.packed(records, sequences)):
        raise ZeroDivisionError


def test_a_stage_without_layers_is_no_error(
    lib: Any, build: Callable[..., Any], sequences: Any, records: Any
) -> None:
    from megatron_trace import enable_fp4, guide

    model = build()
    model.decoder.layers = torch.nn.ModuleList()
    model.decoder.final_layernorm = None
    enable_fp4(model)
    tokens = torch.cat(sequences)[None]
    with guide(lib.packed(records, sequences)):
        model(tokens, torch.zeros_like(tokens), None)
