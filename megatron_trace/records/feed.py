"""Micro-batches prepared ahead of use: fetched, lined up and copied while the model computes.

A thread does the work. On a GPU the copies go from pinned memory over a stream of their own, and
the stream that computes waits for them on the device, so the host waits only if the records are not
there yet.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_trace.parallel import ContextParallel
from megatron_trace.records.fetch import fetch_records
from megatron_trace.records.guidance import Guidance
from megatron_trace.records.microbatch import GuidedMicroBatch

if TYPE_CHECKING:
    from torch import nn

    from bridge.client.client import TraceClient

_POLL_INTERVAL_S = 0.1


@dataclass(frozen=True)
class MicroBatchRequest:
    """What one micro-batch consists of; the fields are those of `GuidedMicroBatch.from_records`.

    trajectories  the name of every sequence's trajectory, in order
    tokens        the model's input ids: [b, s] right-padded, or [1, t] packed
    """

    trajectories: Sequence[str]
    tokens: Tensor
    weight_version: str | None
    max_version_lag: int = 0
    lengths: Sequence[int] | Tensor | None = None
    cu_seqlens: Sequence[int] | Tensor | None = None
    cu_seqlens_padded: Sequence[int] | Tensor | None = None
    pad_sequence: bool = False


@dataclass(frozen=True)
class _Ready:
    """A prepared micro-batch and what its copies wait for; or the error that ended the work."""

    batch: GuidedMicroBatch | None = None
    copied: torch.cuda.Event | None = None
    error: BaseException | None = None


class RecordFeed:
    """Iterates over the guided micro-batches of requests, prepared up to `depth` ahead.

    waited_s  how long the consumer has waited for records so far, in seconds

    The client is used by the feed's thread alone while it runs. Leaving the `with` block, or an
    error, stops the thread.
    """

    def __init__(
        self,
        client: TraceClient,
        requests: Iterable[MicroBatchRequest],
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        guidance: Guidance | None = None,
        device: torch.device | str = "cpu",
        depth: int = 2,
    ) -> None:
        """Start to prepare micro-batches.

        Args:
            client: connected to the bridges that hold the records.
            requests: one for each micro-batch, in the order in which the model computes them.
            model: marked by `enable_fp4`; this rank then fetches its own heads alone.
            guidance: see `Guidance`.
            device: where the model computes.
            depth: micro-batches that may be ready ahead; memory holds one more than that.
        """
        self.waited_s = 0.0
        self._client = client
        self._model = model
        self._guidance = guidance or Guidance()
        self._device = torch.device(device)
        self._stream = _stream_on(self._device)
        self._ready: queue.Queue[_Ready] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._ended = False
        # Megatron's groups are looked up here: the thread may outlive them.
        self._context = ContextParallel.current()
        self._thread = threading.Thread(
            target=self._run, args=(iter(requests),), name="trace-feed", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> RecordFeed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[GuidedMicroBatch]:
        """Yield every micro-batch once.

        Raises:
            TraceError: what `fetch_records` or `from_records` raised for the next micro-batch.
        """
        while (ready := self._next()).batch is not None:
            if ready.copied is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(ready.copied)
                ready.batch.record_stream(stream)
            yield ready.batch

    def _next(self) -> _Ready:
        """Wait for what the thread has prepared next; nothing once it has ended."""
        begin = time.monotonic()
        while not self._ended:
            try:
                ready = self._ready.get(timeout=_POLL_INTERVAL_S)
            except queue.Empty:
                self._ended = self._stopped.is_set()
                continue
            self.waited_s += time.monotonic() - begin
            self._ended = ready.batch is None
            if ready.error is not None:
                self.close()
                raise ready.error
            return ready
        return _Ready()

    def close(self) -> None:
        """Stop preparing; what is ready is dropped."""
        self._stopped.set()
        self._thread.join()
        self._ended = True

    def _run(self, requests: Iterator[MicroBatchRequest]) -> None:
        try:
            for request in requests:
                if self._stopped.is_set() or not self._put(self._prepared(request)):
                    return
            self._put(_Ready())
        except BaseException as error:  # the consumer raises it
            self._put(_Ready(error=error))

    def _prepared(self, request: MicroBatchRequest) -> _Ready:
        records = fetch_records(self._client, request.trajectories, self._guidance, self._model)
        settings: dict[str, Any] = {
            name: getattr(request, name)
            for name in MicroBatchRequest.__dataclass_fields__
            if name not in ("trajectories", "tokens")
        }
        on_stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with on_stream:
            batch = GuidedMicroBatch.from_records(
                records,
                request.tokens,
                guidance=self._guidance,
                device=self._device,
                context_parallel=self._context,
                **settings,
            )
            if self._stream is None:
                return _Ready(batch)
            return _Ready(batch, self._stream.record_event())

    def _put(self, ready: _Ready) -> bool:
        """Hand over what is ready once there is room; False if nobody wants it any more."""
        while not self._stopped.is_set():
            try:
                self._ready.put(ready, timeout=_POLL_INTERVAL_S)
                return True
            except queue.Full:
                continue
        return False


def _stream_on(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
