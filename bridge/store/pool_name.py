"""A directory whose payloads are in a pool: a file with the name under which they are there."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from bridge.store.directory import CorruptStore

_FILE = "pool"


def is_pooled(directory: Path) -> bool:
    """Whether the payloads of a directory are in a pool and not in the directory."""
    return (directory / _FILE).exists()


def pool_name(directory: Path, empty: bool) -> str:
    """Return the directory's name, given to it while it is ``empty``; other bridges have others.

    Raises:
        CorruptStore: it holds entries without a name: their payloads are in the directory.
    """
    file = directory / _FILE
    if file.exists():
        return file.read_text().strip()
    if not empty:
        raise CorruptStore(
            f"{directory} keeps its records on disk; serve it without --mooncake or choose "
            "another --dir"
        )
    name = uuid.uuid4().hex
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(descriptor, name.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return name


def refuse_pooled(directory: Path) -> None:
    """Raise CorruptStore if a directory cannot be served without the pool of its payloads."""
    if is_pooled(directory):
        raise CorruptStore(
            f"the records of {directory} are in a Mooncake pool; serve it with --mooncake or "
            "choose another --dir"
        )
