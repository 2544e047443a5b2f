"""Rounded weights kept from one forward to the next, until the weight changes.

Every forward in flight saves the weights that it multiplied with for its backward. Rounded anew for
each, they would be as many copies; kept, they are one, and rounding costs once an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_trace.rounding.fingerprint import fingerprint

_all_kept: WeakSet[KeptRounding] = WeakSet()


class KeptRounding:
    """The rounded form of one weight, and the fingerprint of what it was rounded from.

    What a forward has saved stays as it is when the weight changes: a new tensor is made, and the
    old one goes with the last backward that needs it.
    """

    def __init__(self, shard_group: ProcessGroup | None) -> None:
        self._shard_group = shard_group
        self._rounded: Tensor | None = None
        self._source: tuple[Any, ...] | None = None
        _all_kept.add(self)

    def __reduce__(self) -> tuple[type[KeptRounding], tuple[ProcessGroup | None]]:
        # A copied or saved model rounds its own weights.
        return KeptRounding, (self._shard_group,)

    def of(self, weight: Tensor, round_weight: Callable[[Tensor], Tensor]) -> Tensor:
        """Return `round_weight(weight)`, from before if the weight is still the same.

        Waits for the device, as Megatron's sequential experts do in every layer.
        """
        with torch.inference_mode(False), torch.no_grad():
            source = self._source_of(weight.detach())
            if self._rounded is None or source != self._source:
                self.free()
                self._rounded, self._source = round_weight(weight.detach()), source
            return self._rounded

    def free(self) -> int:
        """Let go of the rounded weight; return the bytes that it took."""
        rounded, self._rounded, self._source = self._rounded, None, None
        return 0 if rounded is None else rounded.untyped_storage().nbytes()

    def _source_of(self, weight: Tensor) -> tuple[Any, ...]:
        """Return what the rounded weight depends on."""
        # Only work on the stream that rounded it is ordered after the rounding.
        stream = torch.cuda.current_stream() if weight.is_cuda else None
        return weight.shape, weight.dtype, weight.device, stream, self._content(weight)

    def _content(self, weight: Tensor) -> int:
        """Return the fingerprint of the weight, or of all parts of it."""
        own = fingerprint(weight)
        if self._shard_group is None:
            return int(own)
        # A rank that rounds anew needs the others for the tensor scale, so all decide alike.
        rank, size = self._shard_group.rank(), self._shard_group.size()
        both = torch.stack((own * (2 * rank + 1), torch.full_like(own, self._rounded is not None)))
        all_reduce(both, ReduceOp.SUM, self._shard_group)
        content, held = map(int, both.tolist())
        if held != size:
            self.free()
        return content


def _free_all(*_: Any) -> None:
    for kept in list(_all_kept):
        kept.free()


# A step changes the weights, so memory that would be let go in the next forward is free before it.
register_optimizer_step_post_hook(_free_all)
