"""How a process of the server tells the launcher why it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridge.errors import TraceError
from sglang_trace.config import TraceConfig


@contextmanager
def reported() -> Iterator[None]:
    """Leave the sentence of a TraceError for the launcher; the error goes on to end the process."""
    try:
        yield
    except TraceError as error:
        if (config := TraceConfig.from_environment()) is not None:
            config.report_failure(str(error))
        raise
