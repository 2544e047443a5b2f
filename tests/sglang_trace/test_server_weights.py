"""Weight updates on the real server, and what ends it. Runs after the capture tests."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer

from bridge import embedded
from bridge.client import TraceClient
from bridge.digest import digest
from bridge.fp4 import quantize_weight
from examples.tiny_model import make_checkpoint
from tests.sglang_trace.conftest import CAPTURE_FLAGS, SERVER_FLAGS
from tests.sglang_trace.live_server import LiveServer, serving

pytestmark = pytest.mark.server

# Earlier releases take updates from tensors outside of a session.
HAS_SESSIONS = hasattr(io_struct, "BeginWeightUpdateReqInput")
# SGLang may wait a minute for a core dump before it ends.
END_TIMEOUT_S = 120
PROMPT = [11, 12, 13, 14, 15]


def expert_digests(checkpoint: Path) -> dict[str, str]:
    """What the trainer computes from its own BF16 weights."""
    weights = load_file(checkpoint / "model.safetensors")
    return {
        name: digest(quantize_weight(weight))
        for name, weight in weights.items()
        if ".experts." in name
    }


def told_digests(client: TraceClient, version: str) -> dict[str, str]:
    end = time.monotonic() + 20
    while not (digests := client.digests(version)):
        assert time.monotonic() < end, f"no digests of {version}"
        time.sleep(0.05)
    return digests


def versions_of(client: TraceClient, trajectory: str) -> tuple[str, ...]:
    end = time.monotonic() + 20
    while trajectory not in {item.trajectory for item in client.list_trajectories()}:
        assert time.monotonic() < end, f"no trajectory {trajectory}"
        time.sleep(0.05)
    return client.fetch(trajectory).weight_versions


def update_from_tensors(server: LiveServer, weights: dict[str, torch.Tensor], **extra: Any) -> None:
    # CPU tensors travel by name: the default strategy passes file descriptors, which only works
    # between a process and its children.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    serialized = MultiprocessingSerializer.serialize(list(weights.items()), output_str=True)
    torch.multiprocessing.set_sharing_strategy(strategy)
    if HAS_SESSIONS:
        server.post("begin_weight_update")
    body = {"serialized_named_tensors": [serialized], "flush_cache": True} | extra
    assert server.post("update_weights_from_tensor", body)["success"]
    if HAS_SESSIONS:
        server.post("end_weight_update")


def test_the_digests_of_the_loaded_weights_are_the_trainers(
    server: LiveServer, checkpoint: Path
) -> None:
    with server.client() as client:
        assert told_digests(client, "default") == expert_digests(checkpoint)


def test_updates_from_disk_and_tensors_requantize_and_name_their_rows(
    server: LiveServer, checkpoint: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "other", seed=1)
    with server.client() as client:
        before = server.generate("before-update", PROMPT, 6)
        disk = {"model_path": str(other), "weight_version": "disk-1"}
        assert server.post("update_weights_from_disk", disk)["success"]
        assert told_digests(client, "disk-1") == expert_digests(other)
        after = server.generate("after-update", PROMPT, 6)
        assert after["output_ids"] != before["output_ids"]
        assert versions_of(client, "before-update") == ("default",)
        assert versions_of(client, "after-update") == ("disk-1",)

        weights = load_file(checkpoint / "model.safetensors")
        update_from_tensors(server, weights, weight_version="tensor-2")
        assert told_digests(client, "tensor-2") == expert_digests(checkpoint)
        again = server.generate("after-second-update", PROMPT, 6)
        assert again["output_ids"] == before["output_ids"]
        assert versions_of(client, "after-second-update") == ("tensor-2",)


def test_an_update_of_one_matrix_leaves_the_other_digests_alone(
    server: LiveServer, checkpoint: Path
) -> None:
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    weight = load_file(checkpoint / "model.safetensors")[name] * 1.5
    update_from_tensors(server, {name: weight}, weight_version="one-matrix")
    with server.client() as client:
        told = told_digests(client, "one-matrix")
    expected = expert_digests(checkpoint) | {name: digest(quantize_weight(weight))}
    assert told == expected


def test_nan_ends_the_server_with_its_place_and_keeps_what_was_acknowledged(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Also the test of --trace-bridge: the records outlive the server."""
    bridge = embedded.start(tmp_path / "records")
    flags = (*SERVER_FLAGS, *CAPTURE_FLAGS, "--trace-bridge", bridge.endpoint)
    with (
        TraceClient(bridge.endpoint) as client,
        serving(checkpoint, tmp_path / "log", *flags) as live,
    ):
        live.generate("safe", PROMPT, 4)
        assert versions_of(client, "safe") == ("default",)
        name = "model.layers.1.post_attention_layernorm.weight"
        poison = load_file(checkpoint / "model.safetensors")[name]
        poison[3] = float("nan")
        update_from_tensors(live, {name: poison})
        # The records of a pass are looked at while the next one runs.
        with suppress(requests.RequestException):
            for attempt in range(5):
                live.generate(f"poisoned-{attempt}", PROMPT, 4)
        assert live.wait(END_TIMEOUT_S) == 1
        last = live.output().strip().splitlines()[-1]
        assert last.startswith("error: The rollout computed NaN or infinity at fc1 of layer 1")
        assert client.fetch("safe").forward_valid.sum() == len(PROMPT) + 3
    bridge.stop()
