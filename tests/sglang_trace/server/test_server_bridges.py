"""The real server on two bridges, one of which is killed and started again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.layout import Site
from bridge.transport.bridge_sharding import shard_of
from tests.sglang_trace.conftest import CAPTURE_FLAGS, SERVER_FLAGS
from tests.sglang_trace.live_server import LiveServer, serving, tokens_of
from tests.sglang_trace.reference_model import ReferenceModel
from tests.sglang_trace.server.test_server_capture import (
    AGREEMENT,
    agreement,
    complete,
    fetch_whole,
    prompt_of,
)

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def bridges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[spawn.EmbeddedBridge]]:
    place = tmp_path_factory.mktemp("bridges")
    started = [spawn.start(place / str(number)) for number in range(2)]
    yield started
    for bridge in started:
        bridge.stop()


@pytest.fixture(scope="module")
def endpoints(bridges: list[spawn.EmbeddedBridge]) -> str:
    return ",".join(bridge.endpoint for bridge in bridges)


@pytest.fixture(scope="module")
def live(
    endpoints: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = (*SERVER_FLAGS, *CAPTURE_FLAGS, "--trace-bridge", endpoints)
    with serving(checkpoint, log, *flags) as server:
        yield server


def test_a_group_whose_trajectories_live_on_two_bridges_shares_its_prompts_rows(
    live: LiveServer, endpoints: str, reference: ReferenceModel
) -> None:
    prompt = prompt_of(40, salt=1)
    names = [f"prompt-1/{sample}" for sample in range(6)]
    assert {shard_of(name, 2) for name in names} == {0, 1}
    live.generate("prompt-1/first", prompt, 4)
    replies = live.generate_together(
        [{"rid": name, "prompt": prompt, "new_tokens": 8} for name in names]
    )
    assert all(reply["meta_info"]["cached_tokens"] == len(prompt) - 1 for reply in replies)
    with TraceClient(endpoints) as client:
        for name, reply in zip(names, replies, strict=True):
            records = fetch_whole(client, name)
            assert records.tokens.tolist() == tokens_of(reply, prompt)
            assert complete(records)
            assert agreement(records, reference) > AGREEMENT
        held = {item.trajectory: item for item in client.list_trajectories("prompt-1/")}
    assert all(held[name].missing_forward == held[name].missing_kv == 0 for name in names)
    for endpoint in endpoints.split(","):
        with TraceClient(endpoint) as one:
            # Neither bridge has everything, and the digests are at both.
            assert 0 < one.stats().forward_rows < sum(item.rows for item in held.values())
            assert one.digests("default")


def test_a_killed_bridge_is_made_up_for_when_it_is_back(
    live: LiveServer, bridges: list[spawn.EmbeddedBridge], endpoints: str
) -> None:
    bridges[1].process.kill()
    bridges[1].process.wait()
    prompt = prompt_of(30, salt=2)
    names = [f"prompt-2/{sample}" for sample in range(6)]
    assert {shard_of(name, 2) for name in names} == {0, 1}
    replies = live.generate_together(
        [{"rid": name, "prompt": prompt, "new_tokens": 6} for name in names]
    )
    with TraceClient(bridges[0].endpoint) as one:
        end = time.monotonic() + 20
        while len(one.list_trajectories("prompt-2/")) < 1:
            assert time.monotonic() < end, "the bridge that lives goes on"
            time.sleep(0.05)
    directory = _directory_of(bridges[1])
    bridges[1] = spawn.start(directory, endpoint=bridges[1].endpoint)
    with TraceClient(endpoints) as client:
        for name, reply in zip(names, replies, strict=True):
            records = fetch_whole(client, name)
            assert records.tokens.tolist() == tokens_of(reply, prompt)
            assert complete(records)
        # What it had acknowledged before is there again.
        assert complete(client.fetch("prompt-1/0"))
        assert client.fetch("prompt-1/0", sites=(Site.ROUTES,)).forward_valid.any()


def _directory_of(bridge: spawn.EmbeddedBridge) -> Path:
    arguments = bridge.process.args
    assert isinstance(arguments, list)
    return Path(str(arguments[arguments.index("--dir") + 1]))
