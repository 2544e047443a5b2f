"""A store's files are its user's only, and nobody else can stop a daemon or swap a file."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.store import CorruptStore, DiskStore, Entry

LIMIT = 4 << 20
_FILES = ("daemon.lock", "data.mdb", "lock.mdb", "ballast")


def test_what_a_store_makes_is_its_users_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = DiskStore(tmp_path / "store", LIMIT)
        store.append([Entry(b"header", b"payload")])
        store.close()
    finally:
        os.umask(before)
    assert _mode(tmp_path / "store") == 0o700
    assert {file.name for file in (tmp_path / "store").iterdir()} >= set(_FILES)
    assert {_mode(file) for file in (tmp_path / "store").iterdir()} == {0o600}


def test_files_of_an_earlier_version_are_closed_to_others(tmp_path: Path) -> None:
    DiskStore(tmp_path / "store", LIMIT).close()
    (tmp_path / "store").chmod(0o755)
    for file in (tmp_path / "store").iterdir():
        file.chmod(0o644)
    DiskStore(tmp_path / "store", LIMIT).close()
    assert _mode(tmp_path / "store") == 0o700
    assert {_mode(tmp_path / "store" / name) for name in _FILES} == {0o600}


def test_a_lock_that_somebody_got_while_all_could_open_it_keeps_no_daemon_out(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "daemon.lock"
    lock.touch()
    lock.chmod(0o644)
    with lock.open() as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        DiskStore(tmp_path, LIMIT).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_hold_of_a_store(tmp_path: Path) -> None:
    DiskStore(tmp_path / "store", LIMIT).close()
    code = """
import os, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
for name in sys.argv[2:]:
    try:
        os.open(sys.argv[1] + "/" + name, os.O_RDONLY)
    except PermissionError:
        continue
    print(name)
"""
    (tmp_path / "store").chmod(0o711)  # even where the directory lets others pass
    command = [sys.executable, "-c", code, str(tmp_path / "store"), *_FILES]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == ""


@pytest.mark.parametrize("name", [*_FILES[:3], "index", "pool"])
def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"somebody's")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / name).symlink_to(elsewhere)
    if name in ("index", "pool"):
        DiskStore(tmp_path / "store", LIMIT).close()
    else:
        with pytest.raises(CorruptStore, match="choose another --dir"):
            DiskStore(tmp_path / "store", LIMIT)
    assert elsewhere.read_bytes() == b"somebody's"


def test_a_directory_of_other_things_keeps_its_mode_and_is_refused_if_others_write_there(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "notes").touch()
    shared.chmod(0o755)
    DiskStore(shared, LIMIT).close()
    assert _mode(shared) == 0o755
    shared.chmod(0o777)
    with pytest.raises(CorruptStore, match=r"other users can make files .* such as .*/bridge"):
        DiskStore(shared, LIMIT)


def test_a_store_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "new.data.mdb").write_bytes(b"half a file of a start that was cut short")
    store = DiskStore(tmp_path, LIMIT)
    assert store.append([Entry(b"header")]) == [0]
    store.close()
    assert not (tmp_path / "new.data.mdb").exists()


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
