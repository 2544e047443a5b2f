"""Which requests change the weights: checked against the installed SGLang, whichever it is."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler
from torch import nn

from bridge.fp4 import Fp4Tensor, quantize_weight
from sglang_trace.moe_method import TraceNvfp4MoEMethod, stored_matrices
from sglang_trace.weight_updates import (
    CHANGES_WEIGHTS,
    LOADS,
    LOADS_AND_QUANTIZES,
    complete_update,
    version_after,
)

HAS_SESSIONS = hasattr(io_struct, "EndWeightUpdateReqInput")
# Handled by the weight updater without a change of the weights that are served.
HARMLESS = {
    "InitWeightsUpdateGroupReqInput",
    "DestroyWeightsUpdateGroupReqInput",
    "InitWeightsSendGroupForRemoteInstanceReqInput",
    "SendWeightsToRemoteInstanceReqInput",
    "GetWeightsByNameReqInput",
    "BeginWeightUpdateReqInput",
    "CheckWeightsReqInput",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
}


def handled_by_the_scheduler() -> set[str]:
    """The request classes that the scheduler dispatches to its weight updater or names."""
    source = inspect.getsource(Scheduler.init_request_dispatcher)
    return set(re.findall(r"(\w*Weight\w*ReqInput|\w*MemoryOccupationReqInput)\b", source))


def test_every_request_that_the_weight_updater_handles_is_known() -> None:
    assert handled_by_the_scheduler() - CHANGES_WEIGHTS - HARMLESS == set()


def test_every_request_that_changes_weights_is_one_of_sglangs() -> None:
    absent = {name for name in CHANGES_WEIGHTS if not hasattr(io_struct, name)}
    assert absent == (set() if HAS_SESSIONS else {"EndWeightUpdateReqInput"})


def request(name: str, **fields: Any) -> Any:
    return type(name, (SimpleNamespace,), {})(**fields)


def updater(model: nn.Module | None = None, **fields: Any) -> Any:
    runner = SimpleNamespace(model=model or nn.Module())
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), **fields)


@pytest.mark.parametrize("name", sorted(CHANGES_WEIGHTS))
def test_nothing_counts_before_the_end_of_a_session(name: str) -> None:
    assert not complete_update(updater(_session=object()), request(name))
    assert complete_update(updater(_session=None), request(name))


def test_other_requests_change_no_weights() -> None:
    assert not complete_update(updater(_session=None), request("TokenizedGenerateReqInput"))


def layer_with_new_masters() -> Any:
    """A model of one MoE layer whose masters have changed since they were quantized."""
    layer = nn.Module()
    layer.quant_method = TraceNvfp4MoEMethod()  # type: ignore[assignment]
    layer.quant_method.create_weights(layer, 2, 32, 16, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for master in (layer.w13_weight, layer.w2_weight):
        master.data.copy_(torch.randn(master.shape, generator=generator))
    return layer


def is_quantized(layer: Any) -> bool:
    stored = dict(stored_matrices(layer, ""))
    expected = quantize_weight(layer.w2_weight[1])
    return equal(stored[".1.down_proj.weight"], expected)


def equal(one: Fp4Tensor, other: Fp4Tensor) -> bool:
    return torch.equal(one.codes_u8, other.codes_u8) and torch.equal(one.scales_u8, other.scales_u8)


@pytest.mark.parametrize("name", sorted(LOADS))
def test_a_release_without_sessions_has_its_updates_quantized_here(name: str) -> None:
    layer = layer_with_new_masters()
    assert not is_quantized(layer)
    assert complete_update(updater(layer), request(name))
    assert is_quantized(layer)


@pytest.mark.parametrize("name", sorted(LOADS_AND_QUANTIZES))
def test_what_sglang_has_quantized_is_not_quantized_twice(name: str) -> None:
    layer = layer_with_new_masters()
    assert complete_update(updater(layer), request(name))
    assert not is_quantized(layer)


def test_a_scheduler_that_knows_no_versions_takes_the_name_from_a_successful_update() -> None:
    named = request("UpdateWeightFromDiskReqInput", weight_version="v7")
    succeeded, failed = (SimpleNamespace(success=success) for success in (True, False))
    assert version_after(object(), named, succeeded) == "v7"
    assert version_after(object(), named, failed) is None
    assert version_after(object(), request("UpdateWeightsFromIPCReqInput"), succeeded) is None
