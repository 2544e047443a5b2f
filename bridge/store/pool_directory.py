"""A store directory with payloads in a pool: a file has the name of the directory there."""

from __future__ import annotations

import uuid
from pathlib import Path

from bridge.store.directory import POOL_FILE, CorruptStore, replace_file


def is_pooled(directory: Path) -> bool:
    """Whether the payloads of a directory are in a pool."""
    return (directory / POOL_FILE).exists()


def next_opening(directory: Path, empty: bool) -> tuple[str, int]:
    """Return (unique name of the directory, number of earlier openings).

    A key in the pool has both, so two processes never write the same key. Otherwise Mooncake could
    report a value as present while the write of a killed process is still in flight.

    Raises:
        CorruptStore: the directory is not ``empty`` and has no name; its payloads are in it.
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
    """Raise CorruptStore if the payloads of a directory are in a pool."""
    if is_pooled(directory):
        raise CorruptStore(
            f"the records of {directory} are in a Mooncake pool; serve it with --mooncake or "
            "choose another --dir"
        )
