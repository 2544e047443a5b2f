"""Which requests change the weights: checked against the installed SGLang, whichever it is."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler import Scheduler

from sglang_trace.weight_updates import CHANGES_WEIGHTS, changes_weights, version_after

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


@pytest.mark.parametrize("name", sorted(CHANGES_WEIGHTS))
def test_nothing_counts_before_the_end_of_a_session(name: str) -> None:
    assert not changes_weights(SimpleNamespace(_session=object()), request(name))
    assert changes_weights(SimpleNamespace(_session=None), request(name))


@pytest.mark.parametrize("name", sorted(CHANGES_WEIGHTS))
def test_a_release_without_sessions_changes_weights_at_once(name: str) -> None:
    assert changes_weights(SimpleNamespace(), request(name))


def test_other_requests_change_no_weights() -> None:
    assert not changes_weights(SimpleNamespace(_session=None), request("TokenizedGenerateReqInput"))


def test_a_scheduler_that_knows_no_versions_takes_the_name_from_a_successful_update() -> None:
    named = request("UpdateWeightFromDiskReqInput", weight_version="v7")
    succeeded, failed = (SimpleNamespace(success=success) for success in (True, False))
    assert version_after(object(), named, succeeded) == "v7"
    assert version_after(object(), named, failed) is None
    assert version_after(object(), request("UpdateWeightsFromIPCReqInput"), succeeded) is None
