"""A directory whose payloads are in a pool: a file with the name under which they are there."""

from __future__ import annotations

import uuid
from pathlib import Path

from bridge.store.directory import POOL_FILE, CorruptStore, replace_file


def is_pooled(directory: Path) -> bool:
    """Whether the payloads of a directory are in a pool and not in the directory."""
    return (directory / POOL_FILE).exists()


def next_opening(directory: Path, empty: bool) -> tuple[str, int]:
    """Return (the directory's name, how often it was opened before); the name is its own.

    Keys are made of both. So no key is written by two processes, the later of which Mooncake would
    tell that the value is there: the write of a process that was killed may still be on its way.

    Raises:
        CorruptStore: it is not ``empty`` and has no name: its payloads are in the directory.
    """
    file = directory / POOL_FILE
    if file.exists():
        name, before = file.read_text().split()
        opening = int(before) + 1
    elif empty:
        name, opening = uuid.uuid4().hex, 0
    else:
        raise CorruptStore(
            f"{directory} keeps its records on disk; serve it without --mooncake or choose "
            "another --dir"
        )
    try:
        replace_file(file, [f"{name} {opening}".encode()])
    except OSError as error:
        raise CorruptStore(
            f"cannot write to {directory} ({error.strerror}); free space on its disk or choose "
            "another --dir"
        ) from error
    return name, opening


def refuse_pooled(directory: Path) -> None:
    """Raise CorruptStore if a directory cannot be served without the pool of its payloads."""
    if is_pooled(directory):
        raise CorruptStore(
            f"the records of {directory} are in a Mooncake pool; serve it with --mooncake or "
            "choose another --dir"
        )
