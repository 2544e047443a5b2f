"""A Mooncake Store pool: values by key in the memory of other processes, moved over TCP.

The client copies values directly from and to the daemon's buffers. The daemon registers no memory
with the transfer engine, because TCP does not need it: every host that reaches the engine's port
could read and write registered memory.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.errors import StoreFull, TraceError
from bridge.wire.envelope import Buffer

# Codes of mooncake-store/include/types.h.
_OK = 0
_NO_ROOM = -200
_NOT_WHOLE = -703  # a writer died half way; the master gives it up after a while
_NOT_FOUND = -704
_NO_ANSWER = (-900, -901)

_MASTER = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:/\[\]]+):(?P<port>\d{1,5})")
_PROBE_S = 2.0
# After a failure answer at once for so long: the daemon serves others meanwhile.
_PAUSE_S = 2.0
_KEYS_A_REQUEST = 10_000
# Mooncake's own defaults let a call hang for 30 s and a connection for 90 s.
_SETTINGS = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}


class NoMooncake(TraceError):
    """The Mooncake client or a library that it needs is not installed."""


class PoolUnreachable(TraceError):
    """The pool does not answer; it may still have its values."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [begin, end) of a value."""

    key: str
    begin: int
    end: int


class Pool:
    """Client of the pool whose master listens at ``master`` (HOST:PORT).

    Raises:
        NoMooncake: the client is not installed.
        PoolUnreachable: no master listens at the address.
    """

    def __init__(self, master: str) -> None:
        self._master = master
        _probe(master)
        self._client, self._pinned = _connect(master)
        self._silent_until = 0.0

    def put(self, values: Mapping[str, Buffer]) -> None:
        """Store non-empty values by key until they are removed.

        Raises:
            StoreFull: the pool has no room for all values; it may have stored some.
            PoolUnreachable: the pool does not answer; it may have stored some values.
        """
        arrays = [np.frombuffer(value, dtype=np.uint8) for value in values.values()]
        sizes = [array.nbytes for array in arrays]
        addresses = [_address(array) for array in arrays]
        codes = self._ask(self._client.batch_put_from, list(values), addresses, sizes, self._pinned)
        if _NO_ROOM in codes:
            raise StoreFull(
                f"the Mooncake pool at {self._master} has no room for {sum(sizes)} bytes more; "
                "collect old steps (python -m bridge gc) or add a segment to the pool"
            )
        self._check(codes, {_OK})

    def read(self, spans: Sequence[Span], into: NDArray[np.uint8]) -> list[bool]:
        """Read spans into one array; return it and whether the pool has each span.

        Raises:
            PoolUnreachable: the pool may have a value, but it is unreadable now.
        """
        keys = [span.key for span in spans]
        sizes = [span.end - span.begin for span in spans]
        ends = np.cumsum(sizes) + _address(into)
        found = self._ask(self._client.batch_get_session_start, keys)
        try:
            read = self._ask(
                self._client.batch_get_into_multi_buffer_ranges,
                keys,
                [[end - size] for end, size in zip(ends.tolist(), sizes, strict=True)],
                [[size] for size in sizes],
                [[span.begin] for span in spans],
            )
        finally:
            self._client.batch_get_session_end(keys)
        gone = {_NOT_FOUND, _NOT_WHOLE}
        self._check(found, {_OK, *gone})
        present = [code == _OK for code in found]
        rows = zip(read, sizes, present, strict=True)
        self._check([code for code, size, there in rows if there and code != size])
        return present

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Return whether the pool has each value; raise PoolUnreachable."""
        codes = self._ask_in_parts(self._client.batch_is_exist, keys)
        self._check(codes, {0, 1})
        return [code == 1 for code in codes]

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove values; return whether each is certainly removed; raise PoolUnreachable."""
        codes = self._ask_in_parts(lambda part: self._client.batch_remove(part, True), keys)
        self._check([code for code in codes if code in _NO_ANSWER])
        return [code in (_OK, _NOT_FOUND) for code in codes]

    def close(self) -> None:
        """Leave the pool; its values stay."""
        self._client.close()

    def _ask(self, call: Callable[..., list[int]], *args: Any) -> list[int]:
        if time.monotonic() < self._silent_until:
            raise PoolUnreachable(self._no_answer("it did not a moment ago"))
        return call(*args)

    def _ask_in_parts(self, call: Callable[..., list[int]], keys: Sequence[str]) -> list[int]:
        parts = range(0, len(keys), _KEYS_A_REQUEST)
        return [code for at in parts for code in self._ask(call, keys[at : at + _KEYS_A_REQUEST])]

    def _check(self, codes: Sequence[int], expected: Collection[int] = ()) -> None:
        odd = next((code for code in codes if code not in expected), None)
        if odd is not None:
            self._silent_until = time.monotonic() + _PAUSE_S
            raise PoolUnreachable(self._no_answer(f"code {odd}"))

    def _no_answer(self, why: str) -> str:
        return (
            f"the Mooncake pool at {self._master} does not answer ({why}); start its master and "
            "segments again (python -m bridge mooncake on one machine)"
        )


def _probe(master: str) -> None:
    """Connect once, because Mooncake's client tries for a minute and reports no reason."""
    match = _MASTER.fullmatch(master)
    if match is None:
        raise PoolUnreachable(
            f"{master!r} is not the address of a Mooncake master; write it as 127.0.0.1:50051"
        )
    try:
        address = (match["host"].strip("[]"), int(match["port"]))
        socket.create_connection(address, timeout=_PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise PoolUnreachable(
            f"no Mooncake master listens at {master} ({error}); "
            "start one (python -m bridge mooncake) or correct --mooncake"
        ) from error


def _connect(master: str) -> tuple[Any, Any]:
    """Return (client without memory for the pool, replica options without eviction)."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ImportError as error:
        raise NoMooncake(
            f"the Mooncake client cannot be loaded ({error}); pip install 'sglang-trace[mooncake]' "
            "and the system's libibverbs1 and libnuma1"
        ) from error
    client = MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
    if code != _OK:
        raise PoolUnreachable(
            f"what listens at {master} is not a Mooncake master of this version (code {code}); "
            "correct --mooncake"
        )
    pinned = ReplicateConfig()
    pinned.with_hard_pin = True
    return client, pinned


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
