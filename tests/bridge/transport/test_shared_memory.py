"""Memory that a client lends is reached by the bridge that is meant, and by nothing else."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.transport.shared_memory import (
    BUFFER_BYTES,
    BUFFERS,
    STAMP_BYTES,
    ShmSegment,
    opened,
    stamp,
    stamped,
)
from bridge.wire import BufferHandle
from bridge.wire.buffer import MAX_SEGMENT_BYTES

_BYTES = mmap.PAGESIZE + 2 * (STAMP_BYTES + mmap.PAGESIZE)


@pytest.fixture
def segment() -> Iterator[ShmSegment]:
    with closing(ShmSegment(buffers=2, buffer_bytes=mmap.PAGESIZE)) as made:
        yield made


@pytest.fixture
def buffer(segment: ShmSegment) -> BufferHandle:
    acquired = segment.acquire()
    assert acquired is not None
    return acquired


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """Descriptors that end with the test."""
    made: list[int] = []
    yield made
    for fd in made:
        with suppress(OSError):
            os.close(fd)


@pytest.fixture
def lookalike(buffer: BufferHandle, descriptors: list[int]) -> Callable[..., BufferHandle]:
    """lookalike(name, seals, nbytes) -> a buffer of other memory that begins with the same key."""

    def make(
        name: str = "sglang-trace",
        seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
        nbytes: int = _BYTES,
    ) -> BufferHandle:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        descriptors.append(fd)
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, bytes.fromhex(buffer.key), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return replace(buffer, fd=fd)

    return make


def test_the_bridge_writes_into_the_clients_own_memory(
    segment: ShmSegment, buffer: BufferHandle
) -> None:
    memory = opened(buffer)
    assert memory is not None
    assert len(memory) == _BYTES
    memory[buffer.offset + 5 : buffer.offset + 9] = b"rows"
    own = segment.memory(buffer)
    assert bytes(own[5:9]) == b"rows"
    own[5:6] = b"R"
    assert memory[buffer.offset + 5] == ord("R")


def test_places_lie_apart_and_behind_the_key(segment: ShmSegment, buffer: BufferHandle) -> None:
    other = segment.acquire()
    assert other is not None
    assert segment.acquire() is None
    first, second = sorted((buffer.offset, other.offset))
    assert first >= len(buffer.key) // 2
    assert second >= first + STAMP_BYTES + mmap.PAGESIZE
    segment.release(other)
    assert segment.acquire() == other


def test_a_place_is_its_stamp_and_its_rows(segment: ShmSegment, buffer: BufferHandle) -> None:
    memory = segment.memory(buffer)
    assert len(memory) == STAMP_BYTES + buffer.nbytes
    numbers = {stamp(memory) for _ in range(20)}
    assert len(numbers) == 20
    assert stamped(memory) in numbers
    assert not any(memory[STAMP_BYTES:])


def test_the_memory_of_a_connection_is_within_what_a_bridge_maps() -> None:
    assert BUFFERS * (STAMP_BYTES + BUFFER_BYTES) + mmap.PAGESIZE <= MAX_SEGMENT_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which takes root")
def test_memory_of_another_user_is_out_of_reach_even_for_root(
    lookalike: Callable[..., BufferHandle],
) -> None:
    other = lookalike()
    assert opened(other) is not None
    os.fchown(other.fd, 65534, -1)
    assert opened(other) is None


def test_a_lookalike_is_memory_like_any_other(lookalike: Callable[..., BufferHandle]) -> None:
    """What the next tests change is all that keeps it from being opened."""
    assert opened(lookalike()) is not None
    assert opened(lookalike(nbytes=MAX_SEGMENT_BYTES)) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"name": "another"},
        {"name": "sglang-trace2"},
        {"seals": 0},
        {"seals": fcntl.F_SEAL_SHRINK},
        {"seals": fcntl.F_SEAL_GROW},
        {"seals": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE},
        {"nbytes": mmap.PAGESIZE},
        {"nbytes": 0},
        {"nbytes": MAX_SEGMENT_BYTES + mmap.PAGESIZE},
    ],
    ids=str,
)
def test_memory_that_no_client_would_lend_is_refused(
    lookalike: Callable[..., BufferHandle], options: dict[str, int]
) -> None:
    assert opened(lookalike(**options)) is None


@pytest.mark.parametrize("key", ["0" * 32, "", "é" * 32, "\0"])
def test_memory_with_another_key_is_refused(buffer: BufferHandle, key: str) -> None:
    assert opened(replace(buffer, key=key)) is None


def test_a_file_a_pipe_and_a_device_are_refused_and_left_alone(
    buffer: BufferHandle, tmp_path: Path, descriptors: list[int]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes.fromhex(buffer.key) * 1000)
    for fd in (os.open(file, os.O_RDWR), os.open("/dev/null", os.O_RDWR), *os.pipe()):
        descriptors.append(fd)
        assert opened(replace(buffer, fd=fd)) is None
    assert file.read_bytes() == bytes.fromhex(buffer.key) * 1000


def test_a_closed_descriptor_is_refused_also_when_its_number_is_used_again(
    buffer: BufferHandle,
) -> None:
    assert opened(replace(buffer, fd=10**6)) is None
    first = ShmSegment(buffers=1, buffer_bytes=mmap.PAGESIZE)
    old = first.acquire()
    assert old is not None
    first.close()
    assert opened(old) is None
    with closing(ShmSegment(buffers=1, buffer_bytes=mmap.PAGESIZE)) as second:
        new = second.acquire()
        assert new is not None
        assert new.fd == old.fd
        assert opened(new) is not None
        assert opened(old) is None


_LEND = """
import sys
from bridge.transport.shared_memory import ShmSegment
segment = ShmSegment(buffers=1, buffer_bytes=4096)
buffer = segment.acquire()
print(buffer.pid, buffer.fd, buffer.key, buffer.offset, buffer.nbytes, flush=True)
sys.stdin.read()
"""


def test_memory_of_another_process_is_reached_while_it_lives_and_kept_beyond(
    descriptors: list[int],
) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", _LEND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client:
        assert client.stdout is not None
        pid, fd, key, offset, nbytes = client.stdout.readline().split()
        buffer = BufferHandle(int(pid), int(fd), key, int(offset), int(nbytes))
        memory = opened(buffer)
        assert memory is not None
        client.kill()
    memory[-1:] = b"x"
    assert memory[-1] == ord("x")
    assert opened(buffer) is None


def test_a_client_cannot_pull_memory_away_from_under_the_bridge(buffer: BufferHandle) -> None:
    memory = opened(buffer)
    assert memory is not None
    for nbytes in (0, mmap.PAGESIZE, 2 * _BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(buffer.fd, nbytes)
    for seals in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL):
        with pytest.raises(PermissionError):
            fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, seals)
    memory[-1:] = b"x"
    assert memory[-1] == ord("x")


def test_closing_gives_the_memory_back(segment: ShmSegment, buffer: BufferHandle) -> None:
    def held() -> int:
        return sum(
            "memfd:sglang-trace" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )

    before = held()
    memory = opened(buffer)
    with closing(ShmSegment(buffers=1, buffer_bytes=mmap.PAGESIZE)) as other:
        assert held() > before
    del memory, other
    assert held() == before
