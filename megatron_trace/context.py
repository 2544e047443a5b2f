"""The micro-batch that the running forward belongs to.

It is a context variable, set only while a forward runs, and every activation checkpoint captures
it: pipeline schedules run the forward of other micro-batches before a checkpointed layer is
recomputed, so no global can say whose records the recomputation has to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_trace.microbatch import GuidedMicroBatch
    from megatron_trace.rounding import ExpertRows


@dataclass(frozen=True)
class Scope:
    """What the hooks of one running forward share.

    micro_batch   the records to follow; None rounds to nearest
    counting      False while a checkpoint recomputes, so that every site is counted once
    expert_rows   records of the rows dispatched to this rank, between dispatch and combine
    """

    micro_batch: GuidedMicroBatch | None = None
    counting: bool = True
    expert_rows: ExpertRows | None = None


_scope: ContextVar[Scope] = ContextVar("megatron_trace_scope", default=Scope())  # noqa: B039


def current_scope() -> Scope:
    """Return the scope of the running forward, or of its recomputation."""
    return _scope.get()


def set_expert_rows(rows: ExpertRows | None) -> None:
    """Make `rows` the records that the experts called next will follow."""
    _scope.set(replace(_scope.get(), expert_rows=rows))


@contextmanager
def guide(micro_batch: GuidedMicroBatch | None) -> Iterator[None]:
    """Follow the records of `micro_batch` in every forward inside the block.

    The backward may run outside the block: checkpoints remember the micro-batch. With expert
    parallelism the records travel with the tokens, so every rank of the group must guide, by
    records of one layout and one `Guidance`, or none.

    Raises:
        TokenMismatch, TokenCountMismatch, FormMismatch: if the model is given other tokens, or in
            another order or form, than the micro-batch was built from.
        NothingGuided: at the end of the block, if nothing in it asked for the records.
    """
    token = _scope.set(Scope(micro_batch))
    try:
        yield
    finally:
        _scope.reset(token)
    if micro_batch is not None:
        micro_batch.finish_forward()


def bind_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` tied to the current scope; from the second call on it does not count."""
    scopes = [_scope.get()]

    def bound(*args: Any, **kwargs: Any) -> Any:
        token = _scope.set(scopes[0])
        scopes[0] = replace(scopes[0], counting=False)
        try:
            return function(*args, **kwargs)
        finally:
            _scope.reset(token)

    return bound
