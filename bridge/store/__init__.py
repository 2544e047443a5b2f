"""Stores of record bytes: memory with a limit, disk, or a Mooncake pool."""

from bridge.store.base import Entry, Position, Reader, ReadPlan, Run, Store, StoredPayload, Usage
from bridge.store.cached import CachedStore
from bridge.store.directory import CorruptStore, StoreBusy
from bridge.store.disk.lmdb_store import DiskStore
from bridge.store.memory import MemoryStore
from bridge.store.mooncake.store import MooncakeStore

__all__ = [
    "CachedStore",
    "CorruptStore",
    "DiskStore",
    "Entry",
    "MemoryStore",
    "MooncakeStore",
    "Position",
    "ReadPlan",
    "Reader",
    "Run",
    "Store",
    "StoreBusy",
    "StoredPayload",
    "Usage",
]
