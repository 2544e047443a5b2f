"""The real server on two tensor-parallel ranks, each of which sends its share of every row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from bridge.layout import Site
from examples.tiny_model import make_checkpoint
from tests.sglang_trace.conftest import CAPTURE_FLAGS, SERVER_FLAGS
from tests.sglang_trace.live_server import LiveServer, serving, tokens_of
from tests.sglang_trace.reference_model import ReferenceModel
from tests.sglang_trace.server.test_server_capture import (
    AGREEMENT,
    STRANGERS,
    agreement,
    complete,
    fetch_whole,
    prompt_of,
)
from tests.sglang_trace.server.test_server_weights import expert_digests, told_digests

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def live(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with pytest.MonkeyPatch.context() as environment:
        # SGLang wants a NUMA node for every rank on a CPU, or to be told the cores.
        environment.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        with serving(checkpoint, log, *SERVER_FLAGS, *CAPTURE_FLAGS, "--tp-size", "2") as server:
            yield server


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Iterator[TraceClient]:
    with live.client() as client:
        yield client


def test_the_ranks_shares_join_to_what_the_model_computes(
    live: LiveServer, client: TraceClient, reference: ReferenceModel
) -> None:
    prompts = [prompt_of(60 + 7 * group, salt=group) for group in range(2)]
    requested = [
        {"rid": f"group-{group}/{sample}", "prompt": prompt, "new_tokens": 12}
        for group, prompt in enumerate(prompts)
        for sample in range(3)
    ]
    extra = {"sampling_params": {"temperature": 1.0}}
    replies = live.generate_together([request | extra for request in requested])
    for request, reply in zip(requested, replies, strict=True):
        records = fetch_whole(client, request["rid"])
        assert records.tokens.tolist() == tokens_of(reply, request["prompt"])
        assert complete(records)
        assert agreement(records, reference) > AGREEMENT
    shifted = [*records.tokens.tolist()[1:-1], 0]
    assert agreement(records, reference, shifted) < STRANGERS
    assert client.stats().partial_rows == 0
    assert len(records.engine_ids) == 1


def test_each_half_of_a_split_site_agrees_with_the_model_as_well_as_on_one_rank(
    live: LiveServer, server: LiveServer, reference: ReferenceModel
) -> None:
    """A half in the wrong place would still leave the other sites in agreement."""
    prompt = prompt_of(60, salt=9)
    shares = []
    for each in (live, server):
        each.generate("halves", prompt, 1)
        with each.client() as client:
            shares.append(shares_of_halves(fetch_whole(client, "halves"), reference))
    split, whole = shares
    assert split.keys() == whole.keys()
    for place, share in split.items():
        assert share > whole[place] - 0.1, place
        assert share > STRANGERS, place


def shares_of_halves(
    records: TrajectoryRecords, reference: ReferenceModel
) -> dict[tuple[Site, int, int], float]:
    """Share of code words like the written-out model's, by site, layer and half of its values."""
    trace, shares = reference.run(records.tokens.tolist()[:-1]), {}
    for (site, layer), values in trace.sites.items():
        rows = records.kv if site in (Site.K, Site.V) else records.forward
        codes = records.layout.site(rows[:-1], site, layer).low_codes()
        equal = (codes == values.codes_u8.view(codes.shape)).float()
        for half, part in enumerate(equal.chunk(2, dim=-1)):
            shares[site, layer, half] = float(part.mean())
    return shares


def test_digests_are_those_of_whole_matrices_before_and_after_an_update(
    live: LiveServer, client: TraceClient, checkpoint: Path, tmp_path: Path
) -> None:
    assert told_digests(client, "default") == expert_digests(checkpoint)
    other = make_checkpoint(tmp_path / "other", seed=1)
    body = {"model_path": str(other), "weight_version": "next"}
    assert live.post("update_weights_from_disk", body)["success"]
    assert told_digests(client, "next") == expert_digests(other)
    live.generate("after", prompt_of(40, salt=3), 8)
    records = fetch_whole(client, "after")
    assert complete(records)
    assert records.weight_versions == ("next",)
    assert agreement(records, ReferenceModel(other)) > AGREEMENT
