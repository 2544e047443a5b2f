"""Stands between peers and a daemon and cuts TCP connections in the middle of their bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_CHUNK = 4096
_LEAST_BYTES, _MOST_BYTES = 1 << 10, 200 << 10


@contextmanager
def cutting(endpoint: str, most_cuts: int, rng: np.random.Generator) -> Iterator[_Cutter]:
    """Give a proxy in front of a daemon that cuts the first connections after random bytes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    cutter = _Cutter(endpoint, most_cuts, rng)
    try:
        asyncio.run_coroutine_threadsafe(cutter.listen(), loop).result()
        yield cutter
    finally:
        asyncio.run_coroutine_threadsafe(cutter.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Cutter:
    """``endpoint`` is where peers connect; ``done`` counts the connections cut."""

    def __init__(self, daemon: str, most_cuts: int, rng: np.random.Generator) -> None:
        self._port = int(daemon.rpartition(":")[2])
        self._most_cuts = most_cuts
        self._rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""
        self.done = 0

    async def listen(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Cut what is left."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        left = [int(self._rng.integers(_LEAST_BYTES, _MOST_BYTES))]
        ways = [
            asyncio.ensure_future(self._copy(reader, back, left)),
            asyncio.ensure_future(self._copy(there, writer, left)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for stream in (writer, back):
                stream.transport.abort()
            self._tasks.discard(task)

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, left: list[int]
    ) -> None:
        """Copy until the end, or until both ways together have had their bytes."""
        while chunk := await source.read(_CHUNK):
            if self.done < self._most_cuts and len(chunk) > left[0]:
                sink.write(chunk[: left[0]])
                await sink.drain()
                self.done += 1
                return
            left[0] = max(1, left[0] - len(chunk))
            sink.write(chunk)
            await sink.drain()
