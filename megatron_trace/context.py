"""The micro-batch that the running forward belongs to.

It is a context variable, set only while a forward runs, and every activation checkpoint captures
it: pipeline schedules run the forward of other micro-batches before a checkpointed layer is
recomputed, so no global can say whose records the recomputation has to follow.

A layer that runs inside a backward is a recomputation. Under a checkpoint that captured nothing it
would follow no records, or those of whatever `guide` happens to be open, so it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from bridge.errors import TraceError

if TYPE_CHECKING:
    from megatron_trace.records.microbatch import GuidedMicroBatch
    from megatron_trace.rounding.rows import ExpertRows


_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Keep torch.compile out of a function, which would trace in one micro-batch's records."""
    eager: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return eager


class UnboundRecomputation(TraceError):
    """A layer is computed again, and nothing says which micro-batch it belongs to."""


@dataclass(frozen=True)
class Scope:
    """What the hooks of one running forward share.

    micro_batch   the records to follow; None rounds to nearest
    counting      False while a checkpoint recomputes, so that every site is counted once
    expert_rows   records of the rows dispatched to this rank, between dispatch and combine
    probs         probabilities of those rows, where the input of fc2 gives them their gradient
    unrounded     the routed experts' input before rounding, until the shared experts take it
    backward      torch's number of the backward in which the scope was entered; -1: outside of any
    """

    micro_batch: GuidedMicroBatch | None = None
    counting: bool = True
    expert_rows: ExpertRows | None = None
    probs: Tensor | None = None
    unrounded: Tensor | None = None
    backward: int = -1


_scope: ContextVar[Scope] = ContextVar("megatron_trace_scope", default=Scope())  # noqa: B039

# Where no forward was ever guided, every recomputation is as unguided as its forward.
_guided_before = False


def _running_backward() -> int:
    return torch._C._current_graph_task_id()


def current_scope() -> Scope:
    """Return the scope of the running forward, or of its recomputation.

    Raises:
        UnboundRecomputation: in a backward, if no `bind_scope` or `guide` inside it says whose
            records are to be followed.
    """
    scope = _scope.get()
    if _guided_before and scope.backward != _running_backward():
        raise UnboundRecomputation(
            "A layer in FP4 runs inside a backward, under a checkpoint that does not know the "
            "micro-batch of its forward: use Megatron's recompute_granularity, or give the "
            "checkpoint megatron_trace.bind_micro_batch(function), bound anew in every forward."
        )
    return scope


def set_dispatched(rows: ExpertRows | None, probs: Tensor | None) -> None:
    """Make `rows` the records that the experts called next follow, and `probs` theirs to learn."""
    _scope.set(replace(_scope.get(), expert_rows=rows, probs=probs))


def set_unrounded_input(hidden_SBH: Tensor) -> None:
    """Keep the input of a layer's experts for its shared experts."""
    _scope.set(replace(_scope.get(), unrounded=hidden_SBH))


def take_unrounded_input() -> Tensor:
    """Return what `set_unrounded_input` was last given, and keep it no longer."""
    scope = _scope.get()
    assert scope.unrounded is not None, "shared experts run before the routed experts' input"
    _scope.set(replace(scope, unrounded=None))
    return scope.unrounded


@contextmanager
def guide(micro_batch: GuidedMicroBatch | None) -> Iterator[None]:
    """Follow the records of `micro_batch` in every forward inside the block.

    The backward may run outside the block: Megatron's checkpoints remember the micro-batch, and a
    function for any other is to be passed through `bind_micro_batch`. With expert
    parallelism the records travel with the tokens, so every rank of the group must guide, by
    records of one layout and one `Guidance`, or none.

    Raises:
        TokenMismatch, TokenCountMismatch, FormMismatch: if the model is given other tokens, or in
            another order or form, than the micro-batch was built from.
        NothingGuided: at the end of the block, if nothing in it asked for the records.
        UnboundRecomputation: in a backward, from a checkpoint that does not know its micro-batch.
    """
    global _guided_before
    _guided_before = _guided_before or micro_batch is not None
    token = _scope.set(Scope(micro_batch, backward=_running_backward()))
    try:
        yield
    finally:
        _scope.reset(token)
    if micro_batch is not None:
        micro_batch.finish_forward()


def bind_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` tied to the current scope, for one forward and its recomputations.

    Inside a backward it counts nothing: its forward has counted.

    Raises:
        UnboundRecomputation: from the returned function, if it is called in the forward of another
            micro-batch than the one it was bound in.
    """
    bound_scope = _scope.get()

    def bound(*args: Any, **kwargs: Any) -> Any:
        backward = _running_backward()
        if backward < 0 and _scope.get().micro_batch is not bound_scope.micro_batch:
            raise UnboundRecomputation(
                "A function is called in the forward of another micro-batch than the one it was "
                "bound in: call bind_micro_batch inside guide(), anew in every forward."
            )
        counting = bound_scope.counting and backward < 0
        token = _scope.set(replace(bound_scope, counting=counting, backward=backward))
        try:
            return function(*args, **kwargs)
        finally:
            _scope.reset(token)

    return bound
