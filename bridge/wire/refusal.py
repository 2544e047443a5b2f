"""Errors across the wire: an exception in the daemon is raised as the same class at its peer."""

from __future__ import annotations

from bridge.errors import (
    CorruptMessage,
    EngineIdTaken,
    LayoutError,
    RowTaken,
    SchemaMismatch,
    ShmUnreachable,
    StoreFailing,
    StoreFull,
    TooManyRequests,
    TraceError,
    UnknownEngine,
    UnknownTrajectory,
)
from bridge.plain import plain
from bridge.wire.answer import MAX_TEXT_CHARS, Error

_BY_CODE = {
    kind.__name__: kind
    for kind in (
        CorruptMessage,
        EngineIdTaken,
        LayoutError,
        ShmUnreachable,
        RowTaken,
        SchemaMismatch,
        StoreFailing,
        StoreFull,
        TooManyRequests,
        UnknownEngine,
        UnknownTrajectory,
    )
}


def refusal(error: TraceError) -> Error:
    """Return the message that carries an error."""
    return Error(type(error).__name__, plain(str(error))[:MAX_TEXT_CHARS])


def exception(refused: Error) -> TraceError:
    """Return the exception to raise for a message that carries an error."""
    return _BY_CODE.get(refused.code, TraceError)(plain(refused.text))
