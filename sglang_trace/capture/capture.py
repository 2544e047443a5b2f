"""Capture in one scheduler process: from SGLang's objects to rows, trajectories and digests.

Everything here runs on the scheduler's thread and waits for nothing but a full queue.

Shape legend: n rows of a forward pass, T positions of a request, B bytes of a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bridge.errors import TraceError
from bridge.layout import Part, RecordLayout, Site
from bridge.layout.rank_shards import rank_shards
from bridge.producer.producer import RecordProducer
from bridge.transport.bridge_sharding import parse_endpoints
from bridge.wire import TrajectoryState
from sglang_trace.capture.device_to_host import ready_event
from sglang_trace.capture.events import DigestsEvent, RowsEvent, TrajectoryEvent
from sglang_trace.capture.kv_cpu import KVReader, global_scales
from sglang_trace.capture.ledger import NO_ROW, Ledger, Span
from sglang_trace.capture.row_buffer import Gathered, RowBuffer
from sglang_trace.capture.row_routing import RowRouter
from sglang_trace.capture.shipper import Shipper
from sglang_trace.capture.staging import Staging
from sglang_trace.config import TraceConfig
from sglang_trace.quantization.expert_weights import Experts
from sglang_trace.quantization.moe_method import moe_layers
from sglang_trace.requests.rollouts import Rollout, Rollouts
from sglang_trace.requests.unrecorded import Unrecorded, reason_at_end
from sglang_trace.weights.digest import digest_of_model, one_of_all_ranks
from sglang_trace.weights.versions import WeightVersions

if TYPE_CHECKING:
    from sglang_trace.capture.kv_gpu import KVGather

DIGESTS_PER_MESSAGE = 8192
DIGEST_THREADS = 8
# How long a full bridge is waited for: a trainer makes room when its step ends.
FULL_DEADLINE_S = 600.0


class ForwardNotUnderstood(TraceError):
    """A forward pass whose rows cannot be told apart."""


class Capture:
    """What one rank of an engine has recorded and sent.

    All ranks of a tensor-parallel group number rows alike and send their shares of them; one of
    them announces trajectories and digests for all.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: RecordLayout,
        kv: KVReader | KVGather | None,
        ledger: Ledger,
        staging: Staging,
        shipper: Shipper,
        bridges: int = 1,
        *,
        announces: bool = True,
        agree: Callable[[str], str] = str,
    ) -> None:
        self._model = model
        self._layout = layout
        self._kv = kv
        self._ledger = ledger
        self._staging = staging
        self._shipper = shipper
        self._router = RowRouter(bridges)
        self._announces = announces
        # Makes one digest of those of all ranks.
        self._agree = agree
        self._rollouts = Rollouts(bridges)
        self._unrecorded = Unrecorded()
        self._versions = WeightVersions()
        # Whether the weights in use are whole and have no digest yet.
        self._unsealed = False
        self._buffer = RowBuffer.on(staging.rows_MB.device, layout.row_bytes(Part.FORWARD))
        # Of every expert matrix, under its Hugging Face name.
        self._digests: dict[str, str] = {}
        for _name, layer, method in moe_layers(model):
            method.recorder = staging.recorder(layer.layer_id)

    # --- forward passes

    def forward(self, batch: Any) -> None:
        """Record the forward pass that has just been launched."""
        spans = spans_of(batch, self._rollouts)
        count = sum(span.length for span in spans)
        if count:
            self._seal()
            # Whatever follows the requests' own tokens is padding.
            first = self._ledger.record(batch.out_cache_loc[:count], spans)
            if self._layout.row_bytes(Part.FORWARD):
                self._router.keep(first, spans)
                self._ship(self._buffer.add(first, self._staging.head(count)))
        self._shipper.check()

    def _ship(self, gathered: list[Gathered]) -> None:
        for each in gathered:
            rows_n = self._router.numbers(each.first, len(each.rows_nB))
            self._shipper.put(
                RowsEvent(
                    Part.FORWARD,
                    rows_n,
                    self._versions.current,
                    each.rows,
                    each.nbytes,
                    each.ready,
                )
            )

    # --- requests

    def finish(self, req: Any, slots: Tensor) -> None:
        """A request finished or was aborted after it ran; `slots` is its row of the slot table."""
        aborted = req.finished_reason.to_json()["type"] == "abort"
        state = TrajectoryState.ABORTED if aborted else TrajectoryState.FINISHED
        self._announce(req, req.output_ids_through_stop, slots, state)

    def retract(self, req: Any, slots: Tensor) -> None:
        """A running request is about to lose its slots and will be computed again later.

        The pass whose result is still outstanding is thrown away by SGLang, so the last known token
        has consumed nothing that counts: its row is left out, like that of a last sampled token.
        """
        self._announce(req, req.output_ids, slots, TrajectoryState.OPEN)

    def abort(self, req: Any) -> None:
        """A request ended outside the normal path: in the queue, mid-prefill or out of memory.

        Its slots are gone; what it computed last has forward records and no K and V.
        """
        tokens = [*req.origin_input_ids, *req.output_ids]
        rollout = self._rollouts.of(req)
        rows_T = self._ledger.own_rows(rollout.number, len(tokens))
        computed = self._ledger.forget(rollout.number)
        if (computed or req.retraction_count) and self._is_recorded(req, rollout):
            self._put_trajectory(req, rollout, tokens, rows_T, TrajectoryState.ABORTED)

    def _announce(self, req: Any, output_ids: Any, slots: Tensor, state: TrajectoryState) -> None:
        """Send due K and V and the trajectory; the last token has not been consumed."""
        rollout = self._rollouts.of(req)
        if self._is_recorded(req, rollout):
            tokens = [*req.origin_input_ids, *output_ids]
            slots_T = slots[: max(0, len(tokens) - 1)].long()
            rows_T = self._ledger.read(rollout.number, slots_T)
            if self._kv is not None:
                due_T = self._ledger.take_due_kv(rows_T, slots_T)
                for event in self._kv.events(rows_T, slots_T, due_T, self._versions):
                    self._shipper.put(event)
            self._put_trajectory(
                req, rollout, tokens, F.pad(rows_T, (0, 1), value=NO_ROW)[: len(tokens)], state
            )
        self._ledger.forget(rollout.number)

    def _is_recorded(self, req: Any, rollout: Rollout) -> bool:
        """Whether a request that ends or pauses is a trajectory; says so if a client's is not."""
        reason = rollout.reason or reason_at_end(req)
        if reason is not None and self._announces:
            self._unrecorded.count(req.rid, reason)
        return reason is None and rollout.trajectory is not None

    def _put_trajectory(
        self,
        req: Any,
        rollout: Rollout,
        tokens: list[int],
        rows_T: Tensor,
        state: TrajectoryState,
    ) -> None:
        self._ship(self._buffer.take())
        # Twice as fast as from a list, and prompts are long.
        packed = array("i", tokens)
        sampled = len(tokens) > len(req.origin_input_ids)
        self._rollouts.sent(rollout, packed.tobytes(), len(tokens), sampled=sampled)
        if not self._announces or not tokens:
            return
        assert rollout.trajectory is not None
        tokens_T = torch.frombuffer(packed, dtype=torch.int32)
        self._shipper.put(
            TrajectoryEvent(
                rollout.trajectory,
                tokens_T,
                rows_T,
                state,
                tokens_T.nbytes + rows_T.nbytes,
                ready_event(rows_T),
                rollout.number,
                rollout.continues,
            )
        )

    # --- weights

    def weights_changing(self) -> None:
        """Some of an update's weights were loaded: rows from here on belong to no named weights."""
        self._ship(self._buffer.take())
        self._versions.enter(None, self._ledger.next_row)
        self._unsealed = False

    def weights_changed(self, version: str | None) -> None:
        """Weights were loaded or renamed: rows from here on belong to them; send their digests.

        `version` is their new name, None if they have none of their own. The digest of all weights
        together waits for the first row, because an update may come in many requests.
        """
        self._ship(self._buffer.take())
        label = self._versions.enter(version, self._ledger.next_row)
        self._unsealed = True
        self._digests |= changed_digests(self._model)
        if self._ledger.next_row == 0:
            # Nobody waits yet.
            self._seal()
        if not self._announces:
            return
        for names in batched(self._digests, DIGESTS_PER_MESSAGE):
            piece = {name: self._digests[name] for name in names}
            nbytes = sum(len(name) + len(value) for name, value in piece.items())
            self._shipper.put(DigestsEvent(label, piece, nbytes))

    def _seal(self) -> None:
        """Find the digest of all weights if they are new; ranks come here at the same pass."""
        if self._unsealed:
            self._unsealed = False
            self._versions.seal(self._agree(digest_of_model(self._model, self._digests)))

    def close(self) -> None:
        """Send what is left and end the shipper."""
        self._unrecorded.summarize()
        self._ship(self._buffer.take())
        self._shipper.close()


def changed_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return the digests of the expert matrices loaded since the last call, by published name.

    Raises:
        ExpertsNotLoaded: an update has put others in the place of the experts' tensors.
    """
    changed: dict[str, tuple[Experts, int, str]] = {}
    for prefix, _layer, method in moe_layers(model):
        method.experts.check()
        for expert, projection in method.experts.take_changed():
            name = f"{prefix}.{expert}.{projection}_proj.weight"
            changed[name] = (method.experts, expert, projection)
    if torch.cuda.is_available():
        # The threads below copy on streams of their own.
        torch.cuda.synchronize()
    # Hashing leaves Python's lock alone; there may be ten thousands of matrices.
    with ThreadPoolExecutor(DIGEST_THREADS) as threads:
        found = threads.map(lambda place: place[0].digest(*place[1:]), changed.values())
        return dict(zip(changed, found, strict=True))


def spans_of(batch: Any, rollouts: Rollouts) -> list[Span]:
    """Return which positions of which requests a forward pass computes, in row order.

    `batch.trace_requests` are SGLang's requests, as `hooks.on_batch` has left them.

    Raises:
        ForwardNotUnderstood: for a pass that is neither prefill nor decode.
    """
    if batch.forward_mode.is_idle():
        return []
    if batch.forward_mode.is_decode():
        lengths = [1] * len(batch.trace_requests)
        positions = [length - 1 for length in batch.seq_lens_cpu.tolist()]
    elif batch.forward_mode.is_extend_without_speculative():
        positions, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    else:
        raise ForwardNotUnderstood(
            f"A forward pass of mode {batch.forward_mode.name} is not captured: "
            "switch the feature that makes it off, or leave --trace-capture off."
        )
    of_requests = [rollouts.of(req) for req in batch.trace_requests]
    return [
        Span(rollout.number, position, length, rollout.shard)
        for rollout, position, length in zip(of_requests, positions, lengths, strict=True)
    ]


def batched(names: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    """Yield the names in pieces of at most `size` (itertools has this from Python 3.12)."""
    remaining = iter(names)
    while piece := tuple(islice(remaining, size)):
        yield piece


def kv_source(layout: RecordLayout, pool: Any, device: str) -> KVReader | KVGather | None:
    """Return what reads K and V records out of the pool, None if there are none."""
    if not layout.layers_of(Site.K, Site.V):
        return None
    if device != "cuda":
        return KVReader(layout, pool)
    # Triton, which a host without a GPU does not need.
    from sglang_trace.capture.kv_gpu import KVGather

    return KVGather(layout, pool)


def start(model_runner: Any, config: TraceConfig, layout: RecordLayout, max_rows: int) -> Capture:
    """Connect to the bridges and begin to capture what this process computes of the model."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    ranks = get_tp_group()
    shards, rank = rank_shards(layout, ranks.world_size), ranks.rank_in_group
    own = shards[rank].layout
    pool, device = model_runner.token_to_kv_pool, model_runner.device
    endpoints = parse_endpoints(config.bridge)

    def introduce(producer: RecordProducer) -> None:
        model = {"path": model_runner.model_config.model_path}
        scales = global_scales(layout, pool)
        producer.register(config.run, layout, scales, model, shards=shards, shard=rank)

    return Capture(
        model_runner.model,
        own,
        kv_source(own, pool, device),
        Ledger(pool.size + pool.page_size, device),
        Staging(own, max_rows, device),
        Shipper(
            lambda: RecordProducer(
                config.bridge,
                keys=config.bridge_keys or None,
                overflow=config.on_overflow,
                full_deadline_s=FULL_DEADLINE_S,
            ),
            introduce,
            own,
            config.on_overflow,
        ),
        len(endpoints),
        announces=rank == 0,
        agree=one_of_all_ranks(ranks.cpu_group) if ranks.world_size > 1 else str,
    )
