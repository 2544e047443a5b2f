"""Records that went through a real bridge guide the model as the rollout's own do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_rollout import SHAPE, Weights
from torch import Tensor

from bridge.client.client import TraceClient
from bridge.daemon import spawn
from bridge.errors import LayoutError, UnknownTrajectory, WeightVersionMismatch
from bridge.formats import FULL_SCALE_BITS
from bridge.layout import Part, Site, TensorSlice
from bridge.producer.producer import RecordProducer

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPT_TOKENS = 6
KV_SCALES = {1: (0.5, 0.25)}


@pytest.fixture(scope="module")
def lib(one_rank: None) -> Any:
    import micro_batches

    return micro_batches


@pytest.fixture(scope="module")
def sequences(lib: Any) -> list[Tensor]:
    """Two answers to one prompt."""
    prompt, first, second = lib.random_sequences(PROMPT_TOKENS, 7, 4)
    return [torch.cat((prompt, first)), torch.cat((prompt, second))]


@pytest.fixture(scope="module", params=[8, 2], ids=["whole scales", "two bits of a scale"])
def direct(
    request: pytest.FixtureRequest, lib: Any, weights: Weights, sequences: list[Tensor]
) -> list[Any]:
    layout = replace(lib.FULL_LAYOUT, scale_bits=request.param)
    return lib.roll_out(weights, sequences, noise=0.0, layout=layout)[0]


@pytest.fixture(scope="module")
def client(direct: list[Any], sequences: list[Tensor]) -> Iterator[TraceClient]:
    """A bridge that holds both trajectories; the second one refers to the first one's prompt."""
    bridge = spawn.start()
    with RecordProducer(bridge.endpoint) as producer, TraceClient(bridge.endpoint) as asking:
        producer.register("engine", direct[0].layout, KV_SCALES)
        first_row = 0
        for i, (record, tokens) in enumerate(zip(direct, sequences, strict=True)):
            new = slice(0 if i == 0 else PROMPT_TOKENS, len(tokens) - 1)
            rows = torch.arange(new.stop - new.start) + first_row
            producer.send_rows(Part.FORWARD, rows, record.forward[new], "4")
            producer.send_rows(Part.KV, rows, record.kv[new], "4")
            shared = torch.arange(new.start)
            all_rows = torch.cat((shared, rows, torch.tensor([-1])))
            producer.send_trajectory(f"t{i}", 0, tokens, all_rows, "finished")
            first_row += len(rows)
        producer.flush()
        yield asking
    bridge.stop()


def test_fetched_records_guide_like_the_rollouts_own(
    lib: Any,
    client: TraceClient,
    build_fp4: Callable[..., Any],
    sequences: list[Tensor],
    direct: list[Any],
) -> None:
    from megatron_trace import fetch_records

    fetched = fetch_records(client, ["t0", "t1"])
    through = lib.packed(fetched, sequences, version="4")
    own = lib.packed(direct, sequences)
    for part in Part:
        assert torch.equal(through.rows.of(part), own.rows.of(part))
        assert torch.equal(through.rows.state_of(part), own.rows.state_of(part))
    assert through.kv_global_scale(Site.V, 1).item() == 0.25
    lib.packed_logits(build_fp4(), sequences, through)
    assert through.report().total().missing == 0


def test_only_the_chosen_layers_and_sites_travel(client: TraceClient) -> None:
    from megatron_trace import Guidance, fetch_records

    guidance = Guidance(layers=(2, 3), sites=(Site.FC2,))
    (record,) = fetch_records(client, ["t0"], guidance)
    assert record is not None
    assert record.layout.layers == (2, 3)
    assert record.layout.sites == (Site.FC2, Site.ROUTES)
    assert record.kv.shape[1] == 0


def test_an_unknown_trajectory_and_another_weight_version_are_refused_or_counted(
    lib: Any, client: TraceClient, build_fp4: Callable[..., Any], sequences: list[Tensor]
) -> None:
    from megatron_trace import Guidance, fetch_records

    with pytest.raises(UnknownTrajectory):
        fetch_records(client, ["t0", "lost"])
    with pytest.raises(WeightVersionMismatch, match=r"'4'.*'5'"):
        lib.packed(fetch_records(client, ["t0", "t1"]), sequences, version="5")

    lenient = Guidance(on_missing="round_to_nearest")
    records = fetch_records(client, ["t0", "lost"], lenient)
    micro_batch = lib.packed(records, sequences, version="4", on_missing="round_to_nearest")
    lib.packed_logits(build_fp4(), sequences, micro_batch)
    count = micro_batch.report().total([Site.K])
    assert count.missing == count.guided * len(sequences[1]) / (len(sequences[0]) - 1)


def test_records_of_another_tensor_parallel_rank_guide_nothing(
    lib: Any,
    client: TraceClient,
    build_fp4: Callable[..., Any],
    direct: list[Any],
    sequences: list[Tensor],
) -> None:
    from megatron_trace.records.guidance import GuidanceError
    from megatron_trace.rounding.rows import RecordsOfOtherRank

    half = SHAPE.num_kv_heads // 2
    if direct[0].layout.scale_bits != FULL_SCALE_BITS:
        with pytest.raises(LayoutError, match="0 to 32 of 64 at k divide a byte of 2-bit"):
            client.fetch("t0", tensor_slice=TensorSlice(heads=(0, half)))
        return
    heads = list(client.fetch_all(["t0", "t1"], tensor_slice=TensorSlice(heads=(0, half))))
    with pytest.raises(RecordsOfOtherRank, match="fetch them on every rank"):
        lib.packed_logits(build_fp4(), sequences, lib.packed(heads, sequences, version="4"))
    width = list(client.fetch_all(["t0", "t1"], tensor_slice=TensorSlice(fc2=(0, 16))))
    with pytest.raises(GuidanceError, match="fetch fc2 whole"):
        lib.packed(width, sequences, version="4")


def test_one_rank_fetches_all_heads_of_its_model(
    client: TraceClient, build_fp4: Callable[..., Any], direct: list[Any]
) -> None:
    from megatron_trace import fetch_records

    fetched = fetch_records(client, ["t0"], model=build_fp4())
    assert torch.equal(fetched[0].kv[:-1], direct[0].kv[:-1])


@pytest.mark.parametrize("arrives", [True, False])
def test_rows_on_their_way_are_waited_for_and_lost_ones_are_an_error(
    lib: Any,
    client: TraceClient,
    direct: list[Any],
    sequences: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
    arrives: bool,
) -> None:
    from megatron_trace import fetch_records
    from megatron_trace.records.microbatch import MissingRecords

    monkeypatch.setattr(
        "megatron_trace.records.fetch.LATE_ROWS_TIMEOUT_S", 20.0 if arrives else 0.3
    )
    record, tokens, name = direct[0], sequences[0], f"late-{arrives}"
    rows = torch.arange(len(tokens) - 1)
    with RecordProducer(client.endpoint) as producer, ThreadPoolExecutor(1) as trainer:
        producer.register(name, record.layout, KV_SCALES)
        producer.send_rows(Part.FORWARD, rows, record.forward[:-1], "4")
        producer.send_rows(Part.KV, rows[:-1], record.kv[:-2], "4")
        reported = torch.cat((rows, torch.tensor([-1])))
        producer.send_trajectory(name, 0, tokens, reported, "finished")
        producer.flush()
        fetched = trainer.submit(fetch_records, client, [name])
        time.sleep(0.2)
        if arrives:
            producer.send_rows(Part.KV, rows[-1:], record.kv[-2:-1], "4")
            producer.flush()
        found = fetched.result()
    if arrives:
        lib.packed(found, [tokens], version="4")
    else:
        with pytest.raises(MissingRecords, match="1 of"):
            lib.packed(found, [tokens], version="4")
