"""Weight updates on the real server, and what ends it. Runs after the capture tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from safetensors.torch import load_file
from sglang.srt.managers import io_struct
from sglang.srt.utils import MultiprocessingSerializer, init_custom_process_group
from torch.distributed import ProcessGroup

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.fp4.digest import digest
from bridge.fp4.nvfp4 import quantize_weight
from bridge.transport.ports import held_port
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


@contextmanager
def session(server: LiveServer) -> Iterator[None]:
    """An update in one or several messages, where the release has such a thing."""
    if HAS_SESSIONS:
        server.post("begin_weight_update")
    yield
    if HAS_SESSIONS:
        server.post("end_weight_update")


def update_from_tensors(server: LiveServer, weights: dict[str, torch.Tensor], **extra: Any) -> None:
    # CPU tensors travel by name: the default strategy passes file descriptors, which only works
    # between a process and its children.
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    serialized = MultiprocessingSerializer.serialize(list(weights.items()), output_str=True)
    torch.multiprocessing.set_sharing_strategy(strategy)
    body = {"serialized_named_tensors": [serialized], "flush_cache": True} | extra
    with session(server):
        assert server.post("update_weights_from_tensor", body)["success"]


GROUP = "trainer"


@contextmanager
def update_group(server: LiveServer) -> Iterator[ProcessGroup]:
    """A process group of this process, the trainer's rank 0, and the server; gloo, so no GPU."""
    port = held_port()
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": GROUP,
        "backend": "gloo",
    }
    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(server.post, "init_weights_update_group", body)
        group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name=GROUP,
            # A server that refuses an update takes no part in its broadcasts.
            timeout=timedelta(seconds=30),
        )
        assert joined.result()["success"]
    yield group
    assert server.post("destroy_weights_update_group", {"group_name": GROUP})["success"]
    torch.distributed.destroy_process_group(group)


def broadcast(
    server: LiveServer, group: ProcessGroup, weights: dict[str, torch.Tensor], **extra: Any
) -> None:
    """Send weights as `update_weights_from_distributed` does: one after the other, or as bytes."""
    body = {
        "names": list(weights),
        "dtypes": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
        "group_name": GROUP,
        **extra,
    }
    sent = [weight.contiguous() for weight in weights.values()]
    if extra.get("load_format") == "flattened_bucket":
        sent = [torch.cat([weight.flatten().view(torch.uint8) for weight in sent])]
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(server.post, "update_weights_from_distributed", body)
        for tensor in sent:
            torch.distributed.broadcast(tensor, src=0, group=group)
        assert taken.result()["success"]


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


def test_updates_over_a_process_group_requantize_in_place_and_name_their_rows(
    server: LiveServer, checkpoint: Path, tmp_path: Path
) -> None:
    """As a trainer sends them: in several messages, while other requests may run in between.

    A digest covers code words and scales. That no tensor was replaced is checked by the server
    after every update, which would have ended otherwise.
    """
    other = make_checkpoint(tmp_path / "other", seed=2)
    old, new = (load_file(place / "model.safetensors") for place in (checkpoint, other))
    names = list(new)
    parts = [{name: new[name] for name in some} for some in (names[::2], names[1::2])]
    with server.client() as client, update_group(server) as group:
        before = server.generate("before-group", PROMPT, 6)
        (named,) = versions_of(client, "before-group")
        with session(server):
            broadcast(server, group, parts[0])
            server.generate("half-updated", PROMPT, 3)
            broadcast(server, group, parts[1], weight_version="group-1")
        assert told_digests(client, "group-1") == expert_digests(other)
        after = server.generate("after-group", PROMPT, 6)
        assert after["output_ids"] != before["output_ids"]
        assert versions_of(client, "after-group") == ("group-1",)
        assert versions_of(client, "half-updated") == (f"{named}+1",)

        whole = {"weight_version": "group-2", "load_format": "flattened_bucket"}
        with session(server):
            broadcast(server, group, old, **whole)
        assert told_digests(client, "group-2") == expert_digests(checkpoint)
        again = server.generate("after-second-group", PROMPT, 6)
        assert again["output_ids"] == before["output_ids"]
        assert versions_of(client, "after-second-group") == ("group-2",)


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
    bridge = spawn.start(tmp_path / "records")
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
