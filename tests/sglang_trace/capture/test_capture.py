"""Capture on stand-ins for SGLang's objects: the rare paths that no test of a server takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.transport.bridge_sharding import row_number, shard_of
from bridge.wire import TrajectoryState
from sglang_trace.capture.capture import Capture, ForwardNotUnderstood, batched, spans_of
from sglang_trace.capture.events import Event, RowsEvent, TrajectoryEvent
from sglang_trace.capture.ledger import Ledger, Span
from sglang_trace.capture.staging import Staging
from sglang_trace.requests.rollouts import Rollouts

LAYOUT = RecordLayout(ModelShape(1, 32, 16, 4, 1, 1, 16, (0,), (0,)), (0,), (Site.FC1,), bits=1)


class Outbox:
    """Keeps what would be shipped."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def put(self, event: Event) -> None:
        self.events.append(event)

    def check(self) -> None: ...

    def trajectories(self) -> list[TrajectoryEvent]:
        return [event for event in self.events if isinstance(event, TrajectoryEvent)]


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def capture(outbox: Outbox) -> Capture:
    staging = Staging(LAYOUT, 16, "cpu")
    made = Capture(torch.nn.Module(), LAYOUT, None, Ledger(32), staging, outbox)  # type: ignore[arg-type]
    made.weights_changed("v0")
    return made


def extend(slots: list[int], *spans: tuple[Any, int, int]) -> Any:
    """A prefill of requests: (request, first position, positions) of each."""
    requests, prefixes, lengths = zip(*spans, strict=True)
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        trace_requests=list(requests),
        extend_prefix_lens_cpu=list(prefixes),
        extend_seq_lens_cpu=list(lengths),
        out_cache_loc=torch.tensor(slots),
    )


def decode(slots: list[int], requests: list[Any], seq_lens: list[int]) -> Any:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        trace_requests=requests,
        seq_lens_cpu=torch.tensor(seq_lens),
        out_cache_loc=torch.tensor(slots),
    )


def request(
    rid: str, prompt: Sequence[int] = (1,), output: Sequence[int] = (), **changes: Any
) -> Any:
    prompt, output = list(prompt), list(output)
    usual: dict[str, Any] = {
        "rid": rid,
        "origin_input_ids": prompt,
        "output_ids": output,
        "output_ids_through_stop": output,
        "finished_reason": SimpleNamespace(to_json=lambda: {"type": "length"}),
        "to_finish": None,
        "beam_group": None,
        "retraction_count": 0,
    }
    return SimpleNamespace(**{**usual, **changes})


def test_spans_name_the_positions_of_prefill_and_decode() -> None:
    a, b, rollouts = request("a"), request("b"), Rollouts()
    prefill = spans_of(extend([1, 2, 3], (a, 4, 2), (b, 0, 1)), rollouts)
    assert prefill == [Span(1, 4, 2), Span(2, 0, 1)]
    assert spans_of(decode([5, 6], [a, b], [7, 2]), rollouts) == [Span(1, 6, 1), Span(2, 1, 1)]
    assert spans_of(SimpleNamespace(forward_mode=ForwardMode.IDLE), rollouts) == []


def test_a_forward_pass_of_speculation_is_not_guessed_at() -> None:
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    with pytest.raises(ForwardNotUnderstood, match="TARGET_VERIFY"):
        spans_of(batch, Rollouts())


def test_padding_behind_the_requests_is_not_recorded(capture: Capture, outbox: Outbox) -> None:
    capture.forward(decode([5, 6, 0, 0], [request("a"), request("b")], [2, 2]))
    event = outbox.events[-1]
    assert isinstance(event, RowsEvent)
    assert event.rows_n.tolist() == [0, 1]
    assert event.encode().shape == (2, LAYOUT.row_bytes(Part.FORWARD))


def test_records_are_a_copy_of_the_staging_rows(capture: Capture, outbox: Outbox) -> None:
    capture.forward(decode([5], [request("a")], [2]))
    event = outbox.events[-1]
    assert isinstance(event, RowsEvent)
    before = event.encode().clone()
    capture._staging.rows_MB.fill_(255)
    assert torch.equal(event.encode(), before)


def test_the_token_that_nothing_consumed_has_no_row(capture: Capture, outbox: Outbox) -> None:
    a = request("a", [7, 8], [9, 10])
    capture.forward(extend([3, 4], (a, 0, 2)))
    capture.forward(decode([5], [a], [3]))
    # Overlap scheduling has launched the next pass before the end of the request is known.
    capture.forward(decode([6], [a], [4]))
    capture.finish(a, torch.tensor([3, 4, 5, 6, 0]))
    (told,) = outbox.trajectories()
    assert told.tokens_T.tolist() == [7, 8, 9, 10]
    assert told.rows_T.tolist() == [0, 1, 2, -1]
    assert told.state is TrajectoryState.FINISHED


def test_a_retracted_request_tells_the_rows_of_its_sampled_tokens_before_it_loses_them(
    capture: Capture, outbox: Outbox
) -> None:
    a = request("a", [7, 8], [9])
    capture.forward(extend([3, 4], (a, 0, 2)))
    capture.forward(decode([5], [a], [3]))
    capture.retract(a, torch.tensor([3, 4, 5]))
    capture.forward(extend([8, 9, 10], (a, 0, 3)))
    a.output_ids.append(11)
    capture.finish(a, torch.tensor([8, 9, 10]))
    first, last = outbox.trajectories()
    assert (first.rollout, last.rollout) == (1, 1), "it stays the same rollout"
    assert (first.rows_T.tolist(), first.state) == ([0, 1, -1], TrajectoryState.OPEN)
    assert (last.rows_T.tolist(), last.state) == ([3, 4, 5, -1], TrajectoryState.FINISHED)


def test_an_abort_in_the_queue_closes_what_an_earlier_run_opened(
    capture: Capture, outbox: Outbox
) -> None:
    capture.abort(request("never-ran", [1, 2], [], finished_reason=None))
    assert not outbox.trajectories()
    capture.abort(request("retracted", [1, 2], [3], finished_reason=None, retraction_count=1))
    (told,) = outbox.trajectories()
    assert (told.rows_T.tolist(), told.state) == ([-1, -1, -1], TrajectoryState.ABORTED)


def test_an_abort_in_the_middle_of_prefill_keeps_the_rows_that_were_computed(
    capture: Capture, outbox: Outbox
) -> None:
    a = request("a", [1, 2, 3, 4], [], finished_reason=None)
    capture.forward(extend([3, 4], (a, 0, 2)))
    capture.abort(a)
    (told,) = outbox.trajectories()
    assert told.rows_T.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    "changes",
    [
        {"rid": "HEALTH_CHECK_1"},
        {"rid": "#no-name"},
        {"finished_reason": SimpleNamespace(to_json=lambda: {"type": "abort"}, status_code=400)},
        {"beam_group": object()},
        {"input_embeds": [[0.5]]},
        {"positional_embed_overrides": object()},
        {"multimodal_inputs": object()},
    ],
)
def test_requests_that_are_no_trajectory_are_not_told(
    capture: Capture, outbox: Outbox, changes: dict[str, Any]
) -> None:
    capture.finish(request(changes.pop("rid", "t"), [0], [5], **changes), torch.tensor([3]))
    assert not outbox.trajectories()


def test_long_lists_of_names_are_sent_in_pieces() -> None:
    assert list(batched("abcde", 2)) == [("a", "b"), ("c", "d"), ("e",)]


def test_rows_are_numbered_with_the_bridge_of_the_trajectory_that_they_are_computed_for(
    outbox: Outbox,
) -> None:
    first, second = (
        request(next(f"t{n}" for n in count() if shard_of(f"t{n}", 2) == shard), [7, 9], [1])
        for shard in (0, 1)
    )
    staging = Staging(LAYOUT, 16, "cpu")
    capture = Capture(torch.nn.Module(), LAYOUT, None, Ledger(32), staging, outbox, bridges=2)  # type: ignore[arg-type]
    capture.weights_changed("v0")
    capture.forward(extend([3, 4], (first, 0, 2)))
    # Another trajectory finds the first token in the prefix cache, and computes the second.
    capture.forward(extend([5], (second, 1, 1)))
    capture.finish(second, torch.tensor([3, 5]))
    (told,) = outbox.trajectories()
    assert told.rows_T.tolist() == [row_number(0, 0), row_number(2, 1), -1]
    shipped = [event.rows_n for event in outbox.events if isinstance(event, RowsEvent)]
    assert torch.cat(shipped).tolist() == [0, 1, row_number(2, 1)]


def test_two_requests_with_one_id_at_a_time_have_rows_of_their_own(
    capture: Capture, outbox: Outbox
) -> None:
    """Two HTTP workers do not know each other's ids; a client that lost its answer sends again."""
    first, second = request("traj-7", [1, 2], [3]), request("traj-7", [4, 5, 6], [7])
    capture.forward(extend([3, 4], (first, 0, 2)))
    capture.forward(extend([5, 6, 7], (second, 0, 3)))
    capture.forward(decode([8, 9], [first, second], [3, 4]))
    capture.finish(second, torch.tensor([5, 6, 7, 9]))
    capture.finish(first, torch.tensor([3, 4, 8]))
    after, before = outbox.trajectories()
    assert (before.rows_T.tolist(), after.rows_T.tolist()) == ([0, 1, -1], [2, 3, 4, -1])
    assert (before.rollout, after.rollout) == (1, 2)
    assert [before.continues, after.continues] == [False, False]


def test_a_pass_without_tokens_and_an_empty_prompt_are_handled(
    capture: Capture, outbox: Outbox
) -> None:
    empty = request("empty", [], [])
    capture.forward(extend([], (empty, 0, 0)))
    capture.finish(empty, torch.tensor([0]))
    capture.abort(request("empty", [], [], retraction_count=1))
    assert not outbox.trajectories()
    assert not any(isinstance(event, RowsEvent) for event in outbox.events)


def test_rows_are_sent_with_the_digest_of_the_weights_that_computed_them(outbox: Outbox) -> None:
    model = torch.nn.Linear(4, 4)
    staging = Staging(LAYOUT, 16, "cpu")
    capture = Capture(model, LAYOUT, None, Ledger(32), staging, outbox)  # type: ignore[arg-type]
    capture.weights_changed("default")
    for slot in (1, 2, 3, 4):
        capture.forward(extend([slot], (request(f"t{slot}"), 0, 1)))
        if slot == 2:
            # An update arrives in pieces: what is computed meanwhile belongs to no known weights.
            capture.weights_changing()
            model.weight.data.add_(1.0)
        elif slot == 3:
            capture.weights_changed("default")
    digests = [event.weights.digest for event in outbox.events if isinstance(event, RowsEvent)]
    assert digests[0] == digests[1] != ""
    assert digests[2] == ""
    assert digests[3] not in ("", digests[0])
