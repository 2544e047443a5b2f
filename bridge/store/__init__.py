"""Where record bytes live: in memory with a limit, and on disk, crash-safe."""

from bridge.store.base import Entry, Fill, Held, Reader, Store
from bridge.store.cached import CachedStore
from bridge.store.directory import CorruptStore, StoreBusy
from bridge.store.disk import DiskStore
from bridge.store.memory import MemoryStore

__all__ = [
    "CachedStore",
    "CorruptStore",
    "DiskStore",
    "Entry",
    "Fill",
    "Held",
    "MemoryStore",
    "Reader",
    "Store",
    "StoreBusy",
]
