"""A process of the server reports to the launcher why it ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridge.errors import TraceError
from sglang_trace.config import TraceConfig


@contextmanager
def reported() -> Iterator[None]:
    """Write the message of a TraceError for the launcher; the error still ends the process."""
    try:
        yield
    except TraceError as error:
        if (config := TraceConfig.from_environment()) is not None:
            config.report_failure(str(error))
        raise
