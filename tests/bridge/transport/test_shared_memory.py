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
    PLACE_BYTES,
    PLACES,
    STAMP_BYTES,
    Region,
    opened,
    stamp,
    stamped,
)
from bridge.wire import Place
from bridge.wire.place import MAX_REGION_BYTES

_BYTES = mmap.PAGESIZE + 2 * (STAMP_BYTES + mmap.PAGESIZE)


@pytest.fixture
def region() -> Iterator[Region]:
    with closing(Region(places=2, place_bytes=mmap.PAGESIZE)) as made:
        yield made


@pytest.fixture
def place(region: Region) -> Place:
    lent = region.borrow()
    assert lent is not None
    return lent


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """Descriptors that end with the test."""
    made: list[int] = []
    yield made
    for fd in made:
        with suppress(OSError):
            os.close(fd)


@pytest.fixture
def lookalike(place: Place, descriptors: list[int]) -> Callable[..., Place]:
    """lookalike(name, seals, nbytes) -> a place of other memory that begins with the same key."""

    def make(
        name: str = "sglang-trace",
        seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
        nbytes: int = _BYTES,
    ) -> Place:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        descriptors.append(fd)
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, bytes.fromhex(place.key), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return replace(place, fd=fd)

    return make


def test_the_bridge_writes_into_the_clients_own_memory(region: Region, place: Place) -> None:
    memory = opened(place)
    assert memory is not None
    assert len(memory) == _BYTES
    memory[place.offset + 5 : place.offset + 9] = b"rows"
    own = region.memory(place)
    assert bytes(own[5:9]) == b"rows"
    own[5:6] = b"R"
    assert memory[place.offset + 5] == ord("R")


def test_places_lie_apart_and_behind_the_key(region: Region, place: Place) -> None:
    other = region.borrow()
    assert other is not None
    assert region.borrow() is None
    first, second = sorted((place.offset, other.offset))
    assert first >= len(place.key) // 2
    assert second >= first + STAMP_BYTES + mmap.PAGESIZE
    region.give_back(other)
    assert region.borrow() == other


def test_a_place_is_its_stamp_and_its_rows(region: Region, place: Place) -> None:
    memory = region.memory(place)
    assert len(memory) == STAMP_BYTES + place.nbytes
    numbers = {stamp(memory) for _ in range(20)}
    assert len(numbers) == 20
    assert stamped(memory) in numbers
    assert not any(memory[STAMP_BYTES:])


def test_the_memory_of_a_connection_is_within_what_a_bridge_maps() -> None:
    assert PLACES * (STAMP_BYTES + PLACE_BYTES) + mmap.PAGESIZE <= MAX_REGION_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which takes root")
def test_memory_of_another_user_is_out_of_reach_even_for_root(
    lookalike: Callable[..., Place],
) -> None:
    other = lookalike()
    assert opened(other) is not None
    os.fchown(other.fd, 65534, -1)
    assert opened(other) is None


def test_a_lookalike_is_memory_like_any_other(lookalike: Callable[..., Place]) -> None:
    """What the next tests change is all that keeps it from being opened."""
    assert opened(lookalike()) is not None
    assert opened(lookalike(nbytes=MAX_REGION_BYTES)) is not None


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
        {"nbytes": MAX_REGION_BYTES + mmap.PAGESIZE},
    ],
    ids=str,
)
def test_memory_that_no_client_would_lend_is_refused(
    lookalike: Callable[..., Place], options: dict[str, int]
) -> None:
    assert opened(lookalike(**options)) is None


@pytest.mark.parametrize("key", ["0" * 32, "", "é" * 32, "\0"])
def test_memory_with_another_key_is_refused(place: Place, key: str) -> None:
    assert opened(replace(place, key=key)) is None


def test_a_file_a_pipe_and_a_device_are_refused_and_left_alone(
    place: Place, tmp_path: Path, descriptors: list[int]
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes.fromhex(place.key) * 1000)
    for fd in (os.open(file, os.O_RDWR), os.open("/dev/null", os.O_RDWR), *os.pipe()):
        descriptors.append(fd)
        assert opened(replace(place, fd=fd)) is None
    assert file.read_bytes() == bytes.fromhex(place.key) * 1000


def test_a_closed_descriptor_is_refused_also_when_its_number_is_used_again(place: Place) -> None:
    assert opened(replace(place, fd=10**6)) is None
    first = Region(places=1, place_bytes=mmap.PAGESIZE)
    old = first.borrow()
    assert old is not None
    first.close()
    assert opened(old) is None
    with closing(Region(places=1, place_bytes=mmap.PAGESIZE)) as second:
        new = second.borrow()
        assert new is not None
        assert new.fd == old.fd
        assert opened(new) is not None
        assert opened(old) is None


_LEND = """
import sys
from bridge.transport.shared_memory import Region
region = Region(places=1, place_bytes=4096)
place = region.borrow()
print(place.pid, place.fd, place.key, place.offset, place.nbytes, flush=True)
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
        place = Place(int(pid), int(fd), key, int(offset), int(nbytes))
        memory = opened(place)
        assert memory is not None
        client.kill()
    memory[-1:] = b"x"
    assert memory[-1] == ord("x")
    assert opened(place) is None


def test_a_client_cannot_pull_memory_away_from_under_the_bridge(place: Place) -> None:
    memory = opened(place)
    assert memory is not None
    for nbytes in (0, mmap.PAGESIZE, 2 * _BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(place.fd, nbytes)
    for seals in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL):
        with pytest.raises(PermissionError):
            fcntl.fcntl(place.fd, fcntl.F_ADD_SEALS, seals)
    memory[-1:] = b"x"
    assert memory[-1] == ord("x")


def test_closing_gives_the_memory_back(region: Region, place: Place) -> None:
    def held() -> int:
        return sum(
            "memfd:sglang-trace" in os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        )

    before = held()
    memory = opened(place)
    with closing(Region(places=1, place_bytes=mmap.PAGESIZE)) as other:
        assert held() > before
    del memory, other
    assert held() == before
