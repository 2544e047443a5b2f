"""The real server on a GPU: decode graphs, overlap scheduling, a pool that overflows, FP4 KV.

No attention backend is named: an NVFP4 KV cache means ours.

What a request records among others (prefix hits, chunks, retraction, aborts) is compared row by row
with what the same tokens record when they are computed alone and from nothing. Each test prints
what it counted (`pytest -s`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bridge.client.client import TraceClient
from bridge.client.records import TrajectoryRecords
from bridge.errors import UnknownTrajectory
from bridge.layout import Part, Site
from examples.tiny_model import make_checkpoint
from tests.sglang_trace.conftest import CHUNK_TOKENS, SERVER_FLAGS
from tests.sglang_trace.kernels.inputs import needs_gpu
from tests.sglang_trace.live_server import LiveServer, serving, tokens_of
from tests.sglang_trace.reference_model import ReferenceModel
from tests.sglang_trace.server.test_server_capture import agreement as written_out_agreement
from tests.sglang_trace.server.test_server_capture import prompt_of
from tests.sglang_trace.server.test_server_weights import (
    broadcast,
    expert_digests,
    session,
    told_digests,
    update_from_tensors,
    update_group,
)

pytestmark = [pytest.mark.gpu, pytest.mark.server, needs_gpu]

# Room for 32 short requests at once, not for 24 long ones.
MOST_REQUESTS, POOL_TOKENS = 32, 1280
GPU_FLAGS = (
    *SERVER_FLAGS,
    *("--max-running-requests", str(MOST_REQUESTS), "--max-total-tokens", str(POOL_TOKENS)),
    *("--cuda-graph-bs-decode", "1", "4", "8", "16", "32", "--mem-fraction-static", "0.3"),
)
CAPTURE = (
    *("--trace-capture", "--trace-sites", "fc1,fc2,k,v,routes"),
    *("--trace-layers", "all", "--trace-bits", "4"),
)
FP4 = ("--quantization", "trace_nvfp4", "--kv-cache-dtype", "nvfp4")
# Batches of another size are computed by other GEMMs, and a sum that is rounded otherwise flips a
# code word now and then. Rows of another position agree on far fewer.
AGREEMENT = 0.85
# A row is where it belongs if no other position's fits it better by more than this. Positions with
# the same token and much the same past are nearly alike.
LIKENESS = 0.03


@pytest.fixture(scope="module")
def servers(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, LiveServer]]:
    """The same server with capture and without it."""
    place = tmp_path_factory.mktemp("gpu")
    wanted = [
        serving(checkpoint, place / "on", *GPU_FLAGS, *CAPTURE),
        serving(checkpoint, place / "off", *GPU_FLAGS, *FP4),
    ]
    begin = time.monotonic()
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        on, off = threads.map(stack.enter_context, wanted)
        print(f"\nservers ready after {time.monotonic() - begin:.0f} s", flush=True)
        yield on, off


@pytest.fixture(scope="module")
def server(servers: tuple[LiveServer, LiveServer]) -> LiveServer:
    return servers[0]


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[TraceClient]:
    with server.client() as client:
        yield client


def fetch(client: TraceClient, rid: str, state: str = "finished") -> TrajectoryRecords:
    end = time.monotonic() + 20
    while True:
        try:
            if (records := client.fetch(rid)).state == state:
                return records
        except UnknownTrajectory:
            pass
        assert time.monotonic() < end, f"{rid} is not {state}"
        time.sleep(0.05)


def requests_of(name: str, count: int, length: int, new_tokens: int) -> list[dict[str, Any]]:
    return [
        {
            "rid": f"{name}/{number}",
            "prompt": prompt_of(length + number % 8, salt=1000 * length + number),
            "new_tokens": new_tokens,
        }
        for number in range(count)
    ]


def generate_at_once(
    server: LiveServer, requested: list[dict[str, Any]], *, ignore_eos: bool = True
) -> list[dict[str, Any]]:
    """Send requests that reach the scheduler in one message, so that it batches them all alike."""
    (new_tokens,) = {request["new_tokens"] for request in requested}
    body = {
        "input_ids": [request["prompt"] for request in requested],
        "rid": [request["rid"] for request in requested],
        "sampling_params": {
            "max_new_tokens": new_tokens,
            "temperature": 0.0,
            "ignore_eos": ignore_eos,
        },
    }
    replies: list[dict[str, Any]] = server.post("generate", body)
    return replies


def greedy_tokens(server: LiveServer, batch: int) -> list[list[int]]:
    """Tokens of one batch, the same for both servers: GEMMs of other shapes round otherwise."""
    server.flush_cache()
    replies = generate_at_once(server, requests_of(f"greedy-{batch}", batch, 9, 16))
    return [reply["output_ids"] for reply in replies]


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_greedy_tokens_are_the_same_with_and_without_capture(
    servers: tuple[LiveServer, LiveServer], batch: int
) -> None:
    on, off = (greedy_tokens(server, batch) for server in servers)
    different = sum(one != other for one, other in zip(on, off, strict=True))
    print(f"batch {batch}: {different} of {batch} replies different with capture", flush=True)
    assert different == 0
    assert len({tuple(tokens) for tokens in on}) > batch // 2, "the replies are hardly distinct"


# --- rows


@dataclass
class Count:
    """Rows of some trajectories."""

    rows: int = 0
    missing: int = 0
    wrong: int = 0
    agreement: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.missing} missing, {self.wrong} wrong, "
            f"{self.agreement / max(self.rows, 1):.4f} of the code words and routes equal alone"
        )


def code_words(records: TrajectoryRecords, parts: list[Part]) -> torch.Tensor:
    """What each consumed token's rows hold: code words and expert ids, [tokens - 1, values]."""
    found = [records.layout.routes(records.forward[:-1]).flatten(1)]
    for part in parts:
        rows = (records.forward if part is Part.FORWARD else records.kv)[:-1]
        for record in records.layout.split(part, rows).values():
            found.append(record.low_codes().flatten(1))
    return torch.cat([values.to(torch.int16) for values in found], dim=1)


def compare_with_alone(
    server: LiveServer,
    client: TraceClient,
    trajectories: list[TrajectoryRecords],
    *,
    aborted: bool = False,
) -> Count:
    """Compute each trajectory's tokens again, alone and with an empty cache, and compare rows.

    A request that is aborted while it waits to be computed again has no keys and values.
    """
    count = Count()
    for number, records in enumerate(trajectories):
        tokens = records.tokens.tolist()[:-1]
        count.rows += len(tokens)
        count.missing += int((~records.forward_valid[:-1]).sum())
        has_kv = bool(records.kv_valid[:-1].all())
        if not has_kv and not aborted:
            count.missing += int((~records.kv_valid[:-1]).sum())
        parts = list(Part) if has_kv else [Part.FORWARD]
        server.flush_cache()
        rid = f"alone-{number}-{time.monotonic_ns()}"
        reply = server.generate(rid, tokens, 1)
        assert reply["meta_info"]["cached_tokens"] == 0, "the cache was meant to be empty"
        mine = code_words(records, parts)
        alone = code_words(fetch(client, rid), parts)[: len(tokens)]
        equal_TT = torch.stack([(row == alone).float().mean(dim=1) for row in mine])
        own_T = equal_TT.diagonal()
        count.agreement += float(own_T.sum())
        count.wrong += int((own_T + LIKENESS < equal_TT.max(dim=1).values).sum())
    return count


def check_rows(count: Count, what: str) -> None:
    print(f"{what}: {count}", flush=True)
    assert count.missing == 0
    assert count.wrong == 0
    assert count.agreement / count.rows > AGREEMENT


def test_the_comparison_finds_rows_at_another_place(
    server: LiveServer, client: TraceClient
) -> None:
    """Also what a run of others and of chunks is held against: one request on an idle server."""
    prompt = prompt_of(40, salt=4)
    reply = server.generate("lone", prompt, 24)
    records = fetch(client, "lone")
    assert records.tokens.tolist() == tokens_of(reply, prompt)
    check_rows(compare_with_alone(server, client, [records]), "one request")
    for rows in (records.forward, records.kv):
        rows[:-1] = rows[:-1].roll(1, dims=0)
    shifted = compare_with_alone(server, client, [records])
    print(f"the same rows one place further: {shifted}", flush=True)
    assert shifted.wrong > shifted.rows // 2


def test_requests_that_run_together_have_the_rows_they_have_alone(
    server: LiveServer, client: TraceClient
) -> None:
    """Prefix hits, several chunks, padded decode graphs."""
    shared = prompt_of(2 * CHUNK_TOKENS + 7, salt=77)
    server.flush_cache()
    server.generate("shared/first", shared, 4)
    requested = requests_of("mixed", 7, 12, 24) + [
        {"rid": f"shared/{number}", "prompt": [*shared, number], "new_tokens": 12}
        for number in range(3)
    ]
    replies = server.generate_together(requested)
    assert sum(reply["meta_info"]["cached_tokens"] for reply in replies) >= 3 * len(shared)
    together = [fetch(client, request["rid"]) for request in requested]
    for request, reply, records in zip(requested, replies, together, strict=True):
        assert records.tokens.tolist() == tokens_of(reply, request["prompt"])
    check_rows(compare_with_alone(server, client, together), "prefix hits and chunks")


def abort_all(server: LiveServer, replies: dict[str, Future[dict[str, Any]]]) -> None:
    """Abort requests until they have ended."""
    while not all(reply.done() for reply in replies.values()):
        for rid in replies:
            server.post("abort_request", {"rid": rid})
        time.sleep(0.05)


def test_nothing_is_missing_or_misplaced_after_retraction_and_abort(
    server: LiveServer, client: TraceClient
) -> None:
    # With ignore_eos SGLang knows how long replies become and never admits too many at once. So
    # one or the other of the long replies may end by itself.
    requested, long = requests_of("crowd", 24, 16, 100), requests_of("long", 3, 20, 400)
    free = {"sampling_params": {"ignore_eos": False}}
    server.flush_cache()
    with ThreadPoolExecutor(len(long)) as threads:
        ends = {
            request["rid"]: threads.submit(server.generate, **request, **free) for request in long
        }
        replies = generate_at_once(server, requested, ignore_eos=False)
        abort_all(server, ends)
    reasons = {rid: end.result()["meta_info"]["finish_reason"]["type"] for rid, end in ends.items()}
    aborted = [rid for rid, reason in reasons.items() if reason == "abort"]
    retractions = sum(reply["meta_info"]["num_retractions"] for reply in replies)
    print(f"{retractions} retractions, {len(aborted)} aborts", flush=True)
    assert retractions > 0, "the pool was meant to overflow"
    assert aborted, "nothing was left to abort"
    crowd = [fetch(client, request["rid"]) for request in requested]
    for request, reply, records in zip(requested, replies, crowd, strict=True):
        assert records.tokens.tolist() == tokens_of(reply, request["prompt"])
    check_rows(compare_with_alone(server, client, crowd), "retraction")
    ended = [fetch(client, rid, "aborted") for rid in aborted]
    check_rows(compare_with_alone(server, client, ended, aborted=True), "abort")


def test_keys_and_values_are_those_of_the_model_written_out(
    servers: tuple[LiveServer, LiveServer], client: TraceClient, reference: ReferenceModel
) -> None:
    """In layer 0 nothing has drifted yet; attention to them decides all that follows."""
    prompt = prompt_of(CHUNK_TOKENS + 30, salt=30)
    servers[0].generate("kv", prompt, 24)
    records = fetch(client, "kv")
    trace = reference.run(records.tokens.tolist()[:-1])
    for site in (Site.K, Site.V):
        record, expected = records.layout.site(records.kv[:-1], site, 0), trace.sites[site, 0]
        codes = record.low_codes()
        equal = float((codes == expected.codes_u8.view(codes.shape)).float().mean())
        scales = float((record.scales_u8 == expected.scales_u8.flatten(1)).float().mean())
        print(f"{site}: {equal:.4f} of code words, {scales:.4f} of scales")
        assert equal > 0.98
        assert scales > 0.98
    share = written_out_agreement(records, reference)
    print(f"all sites: {share:.3f} of code words")
    assert share > AGREEMENT


def test_decode_ran_in_graphs(server: LiveServer) -> None:
    assert "cuda graph: True" in server.output()


def update(server: LiveServer, way: str, checkpoint: Path, version: str) -> None:
    """Bring a checkpoint's weights to the server."""
    if way == "disk":
        body = {"model_path": str(checkpoint), "weight_version": version}
        assert server.post("update_weights_from_disk", body)["success"]
        return
    weights = load_file(checkpoint / "model.safetensors")
    if way == "tensor":
        update_from_tensors(server, weights, weight_version=version)
        return
    with update_group(server) as group, session(server):
        broadcast(server, group, weights, weight_version=version)


@pytest.mark.parametrize("way", ["disk", "tensor", "group"])
def test_updates_are_the_reference_quantization_and_graphs_compute_with_them(
    server: LiveServer, client: TraceClient, checkpoint: Path, tmp_path: Path, way: str
) -> None:
    """Decode graphs know addresses only, so equal tokens say that no tensor was replaced."""
    other, prompt = make_checkpoint(tmp_path / "other", seed=3), prompt_of(12, salt=12)
    server.flush_cache()
    before = server.generate(f"{way}/before", prompt, 16)["output_ids"]
    update(server, way, other, f"{way}-other")
    assert told_digests(client, f"{way}-other") == expert_digests(other)
    assert server.generate(f"{way}/other", prompt, 16)["output_ids"] != before
    assert fetch(client, f"{way}/other").weight_versions == (f"{way}-other",)
    update(server, way, checkpoint, f"{way}-back")
    assert told_digests(client, f"{way}-back") == expert_digests(checkpoint)
    assert server.generate(f"{way}/back", prompt, 16)["output_ids"] == before
    print(f"updates from {way}: as the reference quantizes them", flush=True)
