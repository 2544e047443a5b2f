"""Pins: a trainer protects trajectories from removal for a time.

Each pin is a store entry, so a restart keeps it. Its lease then starts again from the beginning,
because the wall clock may have changed. A pin may therefore last too long, but never too short.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from typing import Self

from bridge.index.tables.saved import Saved, Snapshot, integers, texts
from bridge.index.tables.sizes import text_bytes

_OBJECT_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Pin:
    until: float
    lease_s: int
    entry: int


class Pins:
    """Pinned names with the end of their lease and their store entry."""

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}
        self.nbytes = 0

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps; ends of leases are left out, because they are reset."""
        pins = self._pins.values()
        return {
            "names": texts(self._pins),
            "leases": integers(pin.lease_s for pin in pins),
            "entries": integers(pin.entry for pin in pins),
        }

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Return the pins of a snapshot; `begin_anew` starts their leases."""
        made = cls()
        columns = saved.texts("names"), saved.integers("leases"), saved.integers("entries")
        for name, lease_s, entry in zip(*columns, strict=True):
            made.put(name, lease_s, entry, 0.0)
        return made

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    @property
    def names(self) -> Set[str]:
        """All pinned names."""
        return self._pins.keys()

    def renew(self, name: str, lease_s: int, now: float) -> bool:
        """Restart a lease; return False if the name has no lease of this length."""
        held = self._pins.get(name)
        if held is None or held.lease_s != lease_s:
            return False
        self._pins[name] = _Pin(now + lease_s, lease_s, held.entry)
        return True

    def put(self, name: str, lease_s: int, entry: int, now: float) -> list[int]:
        """Pin a name by a new store entry; return the entries that are no longer needed."""
        superseded = self.remove([name])
        self._pins[name] = _Pin(now + lease_s, lease_s, entry)
        self.nbytes += cost(name)
        return superseded

    def remove(self, names: Iterable[str]) -> list[int]:
        """Unpin names; return their store entries."""
        entries = []
        for name in names:
            held = self._pins.pop(name, None)
            if held is not None:
                entries.append(held.entry)
                self.nbytes -= cost(name)
        return entries

    def entries(self) -> list[int]:
        """Return the store entries of all pins."""
        return [pin.entry for pin in self._pins.values()]

    def forget(self, entries: Set[int]) -> None:
        """Unpin the names of these store entries."""
        self.remove([name for name, pin in self._pins.items() if pin.entry in entries])

    def begin_anew(self, now: float) -> None:
        """Restart all leases."""
        for name, pin in self._pins.items():
            self._pins[name] = replace(pin, until=now + pin.lease_s)

    def expire(self, now: float) -> list[int]:
        """Unpin names whose lease has ended; return their store entries."""
        return self.remove([name for name, pin in self._pins.items() if pin.until <= now])


def cost(name: str) -> int:
    """Return the approximate bytes of a pin."""
    return text_bytes(name) + _OBJECT_BYTES
