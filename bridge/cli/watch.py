"""Ask several daemons for their status at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

from bridge.cli.patience import waiting_for
from bridge.client.connection import Connection
from bridge.errors import TraceError
from bridge.observe.status import Status, from_json
from bridge.wire import Observe, ObserveReply


class Watch(AbstractContextManager["Watch"]):
    """Connections to daemons; use it from one thread."""

    def __init__(
        self,
        endpoints: Iterable[str],
        keys: str | os.PathLike[str] | None = None,
        timeout_s: float = 2.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._connections = {endpoint: Connection(endpoint, keys) for endpoint in endpoints}

    def statuses(self) -> dict[str, Status | TraceError]:
        """Return the status or the error of each daemon, by endpoint."""
        end = time.monotonic() + self._timeout_s
        asked = {name: peer.send(Observe()) for name, peer in self._connections.items()}
        return {name: _status(self._connections[name], seq, end) for name, seq in asked.items()}

    def first_statuses(self) -> dict[str, Status | TraceError]:
        """Return the statuses, and print a message to stderr if that takes long."""
        with waiting_for(f"the bridge at {', '.join(self._connections)}", self._timeout_s):
            return self.statuses()

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.close()


def _status(connection: Connection, seq: int, end: float) -> Status | TraceError:
    try:
        return from_json(connection.receive(seq, ObserveReply, end).document)
    except TraceError as error:
        return error
