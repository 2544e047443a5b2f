"""From the GPU to the shipper's thread, without the scheduler's thread ever waiting.

The scheduler's thread records an event behind the kernels that make a tensor and goes on. The
shipper's thread copies behind that event, on a stream of its own, into pinned memory, and is the
only one that waits.

Shape legend: n rows of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PINNED_BYTES = 32 << 20


def ready_event(tensor: Tensor) -> torch.cuda.Event | None:
    """Return the event behind which the current stream has made a tensor; None on a CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class HostCopy:
    """Copies tensors to the host; use it from one thread."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def to_host(self, tensor_n: Tensor, ready: torch.cuda.Event | None) -> Iterator[Tensor]:
        """Yield the tensor in host memory, chunk by chunk along n; a chunk lives until the next.

        The caller keeps the tensor until the end: its memory may be used again after that.
        """
        if ready is None:
            yield tensor_n
            return
        row = tensor_n[:1].nbytes
        step = max(1, PINNED_BYTES // max(1, row))
        for chunk in tensor_n.split(step):  # type: ignore[no-untyped-call]
            yield self._copy(chunk, ready)

    def to_host_copy(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        """Return the tensor in ordinary host memory."""
        return torch.cat([chunk.clone() for chunk in self.to_host(tensor, ready)])

    def _copy(self, chunk: Tensor, ready: torch.cuda.Event) -> Tensor:
        with torch.cuda.device(chunk.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if len(self._pinned) < chunk.nbytes:
                room = max(PINNED_BYTES, chunk.nbytes)
                self._pinned = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            target = self._pinned[: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
            # A blocking event leaves the core to the scheduler's thread.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                target.copy_(chunk, non_blocking=True)
                done.record()
            done.synchronize()
        return target
