"""What the bridge is measured against: the same bytes over bare pyzmq, and straight to a file."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from bridge.client.connection import Connection as BridgeConnection
from bridge.client.paging import Paging
from bridge.wire import Fetch, FetchReply, encode
from bridge.wire.envelope import Buffer

QUEUE = 16  # messages, as in the bridge
Frames = list[Buffer]


class BarePipe:
    """PUSH in one process, PULL in another, over loopback TCP without copies and without checks.

    Without ``held`` this process sends. Otherwise the other process calls it for the messages that
    it holds from then on, and sends all of them, each once: they come out of its memory as records
    do, where one message again and again would come out of a cache.
    """

    def __init__(self, held: Callable[[], list[Frames]] | None = None) -> None:
        self._here, there = multiprocessing.Pipe()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH if held is None else zmq.PULL)
        self._socket.setsockopt(zmq.SNDHWM if held is None else zmq.RCVHWM, QUEUE)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._process = multiprocessing.get_context("spawn").Process(
            target=_other_end, args=(there, f"tcp://127.0.0.1:{port}", held), daemon=True
        )
        self._process.start()
        there.close()  # so that the end of the other process is noticed
        self.messages: int = self._here.recv()

    @property
    def pid(self) -> int | None:
        """The other process."""
        return self._process.pid

    def push(self, frames: Sequence[Buffer], messages: int) -> None:
        """Send a message so many times and return when the last has arrived."""
        self._here.send(messages)
        for _ in range(messages):
            self._socket.send_multipart(frames, copy=False)
        self._here.recv()

    def pull(self) -> None:
        """Receive all messages that the other process holds."""
        self._here.send(self.messages)
        for _ in range(self.messages):
            self._socket.recv_multipart(copy=False)

    def close(self) -> None:
        """End the other process."""
        self._here.send(0)
        self._process.join()
        self._context.destroy(linger=0)


def _other_end(pipe: Connection, endpoint: str, source: Callable[[], list[Frames]] | None) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PULL if source is None else zmq.PUSH)
    socket.setsockopt(zmq.RCVHWM if source is None else zmq.SNDHWM, QUEUE)
    socket.connect(endpoint)
    held = [] if source is None else source()
    pipe.send(len(held))
    while messages := pipe.recv():
        for frames in held:
            socket.send_multipart(frames, copy=False)
        if source is None:
            for _ in range(messages):
                socket.recv_multipart(copy=False)
            pipe.send("received")
    context.destroy()


def replies(endpoint: str, names: Sequence[str]) -> list[Frames]:
    """Return the messages with which a bridge answers a fetch of whole trajectories by socket."""
    messages: list[Frames] = []
    with closing(BridgeConnection(endpoint)) as connection:
        connection._shm_receiver = None  # no rows in memory that is used again
        paging = Paging(connection, time.monotonic() + 600)
        for name in names:
            at, end = 0, 1
            while at < end:
                seq = connection.send(Fetch(name, at))
                head = connection.receive(seq, FetchReply, paging.end)
                messages.append(encode(head, seq))
                messages += [encode(rows, seq) for rows in paging.rows(head, seq)]
                connection.cancel([seq])
                at, end = at + len(head.tokens), head.length
    return messages


def write_and_sync(file: Path, payload: Buffer, times: int, syncs: int) -> None:
    """Write a payload so many times in a row with so many fsyncs, evenly spread."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    done = 0
    for sync in range(1, syncs + 1):
        while done < times * sync // syncs:
            os.write(descriptor, payload)
            done += 1
        os.fsync(descriptor)
    os.close(descriptor)


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process so far, all threads."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def resident_bytes(pid: int) -> dict[str, int]:
    """Bytes of a process in memory: its own, and pages of files that the kernel may take back."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile")}
