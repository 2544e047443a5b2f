"""Where record bytes live: in memory with a limit, or on disk and crash-safe."""

from bridge.store.base import Entry, Reader, Store
from bridge.store.disk import CorruptStore, DiskStore, StoreBusy
from bridge.store.memory import MemoryStore

__all__ = ["CorruptStore", "DiskStore", "Entry", "MemoryStore", "Reader", "Store", "StoreBusy"]
