"""What the bridge is measured against: the same bytes over bare pyzmq, and straight to a file."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from bridge.wire.envelope import Buffer

QUEUE = 16  # messages, as in the bridge
HELD_BYTES = 256 << 20  # a sender of records has them in memory, not one of them in its cache


class BarePipe:
    """PUSH in one process, PULL in another, over loopback TCP without copies and without checks."""

    def __init__(self, frames: Sequence[Buffer], *, to_child: bool) -> None:
        self._frames = frames
        self._to_child = to_child
        self._here, there = multiprocessing.Pipe()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH if to_child else zmq.PULL)
        self._socket.setsockopt(zmq.SNDHWM if to_child else zmq.RCVHWM, QUEUE)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        sent = [] if to_child else [bytes(frame) for frame in frames]
        self._process = multiprocessing.get_context("spawn").Process(
            target=_other_end, args=(there, f"tcp://127.0.0.1:{port}", sent), daemon=True
        )
        self._process.start()
        there.close()  # so that the end of the other process is noticed
        self._here.recv()

    @property
    def pid(self) -> int | None:
        """The other process."""
        return self._process.pid

    def move(self, messages: int) -> None:
        """Move so many messages of the frames and return when the last has arrived."""
        self._here.send(messages)
        for _ in range(messages):
            if self._to_child:
                self._socket.send_multipart(self._frames, copy=False)
            else:
                self._socket.recv_multipart(copy=False)
        if self._to_child:
            self._here.recv()

    def close(self) -> None:
        """End the other process."""
        self._here.send(0)
        self._process.join()
        self._context.destroy(linger=0)


def _other_end(pipe: Connection, endpoint: str, frames: Sequence[bytes]) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH if frames else zmq.PULL)
    socket.setsockopt(zmq.SNDHWM if frames else zmq.RCVHWM, QUEUE)
    socket.connect(endpoint)
    nbytes = sum(len(frame) for frame in frames)
    copies = 1 + HELD_BYTES // nbytes if frames else 0
    held = [[bytearray(frame) for frame in frames] for _ in range(copies)]
    pipe.send("ready")
    while messages := pipe.recv():
        for number in range(messages):
            if frames:
                socket.send_multipart(held[number % len(held)], copy=False)
            else:
                socket.recv_multipart(copy=False)
        if not frames:
            pipe.send("received")
    context.destroy()


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
