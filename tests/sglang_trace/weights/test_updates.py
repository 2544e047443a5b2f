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

from sglang_trace import hooks
from sglang_trace.weights.updates import (
    CHANGES_WEIGHTS,
    WeightsNotNamed,
    changes_weights,
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


class CaptureInLog:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str | None] = []

    def weights_changing(self) -> None:
        self.told.append("changing")

    def weights_changed(self, version: str | None) -> None:
        self.told.append(version)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> CaptureInLog:
    made = CaptureInLog()
    monkeypatch.setattr(hooks, "_capture", made)
    return made


def scheduler_of(session: object | None, **more: Any) -> Any:
    return SimpleNamespace(weight_updater=SimpleNamespace(_session=session), **more)


@pytest.mark.parametrize("name", sorted(CHANGES_WEIGHTS))
def test_weights_have_no_name_before_the_end_of_a_session(name: str, capture: CaptureInLog) -> None:
    named, done = request(name, weight_version="v7"), SimpleNamespace(success=True)
    hooks.on_request(scheduler_of(object()), named, done)
    hooks.on_request(scheduler_of(None), named, done)
    assert capture.told == ["changing", "v7"]


def test_a_release_without_sessions_changes_weights_at_once(capture: CaptureInLog) -> None:
    scheduler = SimpleNamespace(weight_updater=SimpleNamespace())
    named = request("UpdateWeightsFromDistributedReqInput", weight_version="v8")
    hooks.on_request(scheduler, named, SimpleNamespace(success=True))
    assert capture.told == ["v8"]


def test_other_requests_change_no_weights(capture: CaptureInLog) -> None:
    other = request("TokenizedGenerateReqInput")
    assert not changes_weights(other)
    hooks.on_request(scheduler_of(None), other, None)
    assert capture.told == []


def test_a_scheduler_that_knows_no_versions_takes_the_name_from_a_successful_update() -> None:
    named = request("UpdateWeightFromDiskReqInput", weight_version="v7")
    succeeded, failed = (SimpleNamespace(success=success) for success in (True, False))
    assert version_after(object(), named, succeeded) == "v7"
    assert version_after(object(), named, failed) is None
    assert version_after(object(), request("UpdateWeightsFromIPCReqInput"), succeeded) is None


@pytest.mark.skipif(not HAS_SESSIONS, reason="this SGLang's scheduler knows no weight versions")
def test_an_update_that_does_not_get_its_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    served = SimpleNamespace(weight_version="v7")
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: served)
    scheduler = SimpleNamespace(record_weight_version_change=None)
    succeeded, failed = (SimpleNamespace(success=success) for success in (True, False))
    asked = request("UpdateWeightsFromTensorReqInput", weight_version="v8")
    assert version_after(scheduler, asked, failed) == "v7"
    with pytest.raises(WeightsNotNamed, match=r"'v8'.*'v7'"):
        version_after(scheduler, asked, succeeded)
    served.weight_version = "v8"
    assert version_after(scheduler, asked, succeeded) == "v8"
    # The end of a session carries no name.
    assert version_after(scheduler, request("EndWeightUpdateReqInput"), succeeded) == "v8"
