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


def made(tensor: Tensor) -> torch.cuda.Event | None:
    """Return the event behind which the current stream has made a tensor; None on a CPU."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class HostCopy:
    """Brings tensors to the host; use it from one thread."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def bring(self, tensor_n: Tensor, made: torch.cuda.Event | None) -> Iterator[Tensor]:
        """Yield the tensor in host memory, piece by piece along n; a piece lives until the next.

        The caller keeps the tensor until the end: its memory may be used again after that.
        """
        if made is None:
            yield tensor_n
            return
        row = tensor_n[:1].nbytes
        step = max(1, PINNED_BYTES // max(1, row))
        for piece in tensor_n.split(step):  # type: ignore[no-untyped-call]
            yield self._copy(piece, made)

    def whole(self, tensor: Tensor, made: torch.cuda.Event | None) -> Tensor:
        """Return the tensor in ordinary host memory."""
        return torch.cat([piece.clone() for piece in self.bring(tensor, made)])

    def _copy(self, piece: Tensor, made: torch.cuda.Event) -> Tensor:
        with torch.cuda.device(piece.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if len(self._pinned) < piece.nbytes:
                room = max(PINNED_BYTES, piece.nbytes)
                self._pinned = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            target = self._pinned[: piece.nbytes].view(piece.dtype).view(piece.shape)
            # A blocking event leaves the core to the scheduler's thread.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(made)
                target.copy_(piece, non_blocking=True)
                done.record()
            done.synchronize()
        return target
