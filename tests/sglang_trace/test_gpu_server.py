"""The real server on a GPU: decode graphs, overlap scheduling, a pool that overflows, FP4 KV.

No attention backend is named: an NVFP4 KV cache means ours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.client import TraceClient
from bridge.errors import UnknownTrajectory
from bridge.layout import Part, RecordLayout, Site
from bridge.records import TrajectoryRecords
from tests.sglang_trace.conftest import CHUNK_TOKENS, SERVER_FLAGS
from tests.sglang_trace.kernels.inputs import needs_gpu
from tests.sglang_trace.live_server import LiveServer, serving, tokens_of
from tests.sglang_trace.reference_model import ReferenceModel
from tests.sglang_trace.test_server_capture import agreement as written_out_agreement
from tests.sglang_trace.test_server_capture import prompt_of

pytestmark = [pytest.mark.gpu, pytest.mark.server, needs_gpu]

GPU_FLAGS = (
    *SERVER_FLAGS,
    *("--cuda-graph-bs-decode", "1", "4", "8", "16", "--mem-fraction-static", "0.3"),
)
CAPTURE = (
    *("--trace-capture", "--trace-sites", "fc1,fc2,k,v,routes"),
    *("--trace-layers", "all", "--trace-bits", "4"),
)
FP4 = ("--quantization", "trace_nvfp4", "--kv-cache-dtype", "nvfp4")
# Batches of another size are computed by other GEMMs, and a sum that is rounded otherwise flips a
# code word now and then; the rows of another position agree on far fewer.
AGREEMENT, STRANGERS = 0.85, 0.5


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
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        on, off = threads.map(stack.enter_context, wanted)
        yield on, off


@pytest.fixture(scope="module")
def client(servers: tuple[LiveServer, LiveServer]) -> Iterator[TraceClient]:
    with servers[0].client() as client:
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
            "prompt": prompt_of(length + number, salt=1000 * length + number),
            "new_tokens": new_tokens,
        }
        for number in range(count)
    ]


def complete(records: TrajectoryRecords, keys_too: bool = True) -> bool:
    """Every position has its parts, but for the last token, which nothing consumed."""
    parts = [records.forward_valid, *([records.kv_valid] if keys_too else [])]
    expected = [True] * (len(records) - 1) + [False]
    return all(part.tolist() == expected for part in parts)


def tokens_together(server: LiveServer, batch: int) -> list[list[int]]:
    """Greedy tokens of requests that all wait before the first begins.

    So both servers compute the same batches: GEMMs of other shapes round otherwise.
    """
    requested = requests_of(f"greedy-{batch}", batch, 9, 16)
    body = {
        "input_ids": [request["prompt"] for request in requested],
        "rid": [request["rid"] for request in requested],
        "sampling_params": {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True},
    }
    server.post("flush_cache")
    server.post("pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.post, "generate", body)
        time.sleep(1.0)
        server.post("continue_generation")
        return [reply["output_ids"] for reply in waiting.result()]


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_greedy_tokens_are_the_same_with_and_without_capture(
    servers: tuple[LiveServer, LiveServer], batch: int
) -> None:
    on, off = (tokens_together(server, batch) for server in servers)
    assert on == off


def test_requests_that_run_together_have_the_rows_they_have_alone(
    servers: tuple[LiveServer, LiveServer], client: TraceClient
) -> None:
    """Prefix hits, several chunks, padded decode graphs."""
    server = servers[0]
    shared = prompt_of(2 * CHUNK_TOKENS + 7, salt=77)
    requested = requests_of("mixed", 7, 12, 24)
    requested += [
        {"rid": f"shared/{number}", "prompt": [*shared, number], "new_tokens": 12}
        for number in range(3)
    ]
    replies = server.generate_together(requested)
    together = [fetch(client, request["rid"]) for request in requested]
    for request, reply, records in zip(requested, replies, together, strict=True):
        assert records.tokens.tolist() == tokens_of(reply, request["prompt"])
        assert complete(records)
    server.post("flush_cache")
    for request, records in zip(requested, together, strict=True):
        tokens = records.tokens.tolist()[:-1]
        again = {"rid": f"alone-{request['rid']}", "prompt": tokens, "new_tokens": 1}
        server.generate(**again)
        alone = fetch(client, again["rid"])
        for part, own, other in (
            (Part.FORWARD, records.forward, alone.forward),
            (Part.KV, records.kv, alone.kv),
        ):
            mine, theirs = own[:-1], other[: len(tokens)]
            share = agreement(records.layout, part, mine, theirs)
            print(f"{request['rid']} {part}: {share:.3f} as alone")
            assert share > AGREEMENT
            assert agreement(records.layout, part, mine[1:], theirs[:-1]) < STRANGERS
        server.post("flush_cache")


def agreement(layout: RecordLayout, part: Part, one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of equal code words and expert ids in rows of a part."""
    equal = []
    if part is Part.FORWARD:
        equal.append((layout.routes(one) == layout.routes(other)).float().flatten())
    theirs = layout.split(part, other)
    for place, record in layout.split(part, one).items():
        equal.append((record.low_codes() == theirs[place].low_codes()).float().flatten())
    return float(torch.cat(equal).mean())


def test_nothing_is_missing_after_retraction_and_abort(
    servers: tuple[LiveServer, LiveServer], client: TraceClient
) -> None:
    server = servers[0]
    requested = [
        request | {"sampling_params": {"ignore_eos": False}}
        for request in requests_of("crowd", 14, 16, 100)
    ]
    timer = threading.Timer(0.3, server.post, ("abort_request", {"rid": "crowd/3"}))
    timer.start()
    replies = server.generate_together(requested)
    timer.join()
    retractions = 0
    for request, reply in zip(requested, replies, strict=True):
        aborted = reply["meta_info"]["finish_reason"]["type"] == "abort"
        retractions += reply["meta_info"].get("num_retractions") or 0
        records = fetch(client, request["rid"], "aborted" if aborted else "finished")
        assert records.tokens.tolist() == tokens_of(reply, request["prompt"])
        # One that is aborted while it waits to be computed again has no keys and values.
        assert complete(records, keys_too=not aborted)
    print("retractions:", retractions)


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
