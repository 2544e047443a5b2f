"""Trajectories that a trainer keeps for a time, whatever is collected meanwhile.

Each is an entry of the store, so that a restart forgets none. Its lease begins anew then: no clock
that could have been set meanwhile decides over records, and a pin is kept too long, not too short.
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
    """Names, until when they are pinned, and the store's entries that say so."""

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}
        self.nbytes = 0

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: no end of a lease, all of which begin anew."""
        pins = self._pins.values()
        return {
            "names": texts(self._pins),
            "leases": integers(pin.lease_s for pin in pins),
            "entries": integers(pin.entry for pin in pins),
        }

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Make again what gave a snapshot; its leases begin with `begin_anew`."""
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
        """Begin a lease anew; return False if there is none as long, which an entry has to say."""
        held = self._pins.get(name)
        if held is None or held.lease_s != lease_s:
            return False
        self._pins[name] = _Pin(now + lease_s, lease_s, held.entry)
        return True

    def put(self, name: str, lease_s: int, entry: int, now: float) -> list[int]:
        """Pin a name as the store's new entry says; return the entries that say it no more."""
        superseded = self.remove([name])
        self._pins[name] = _Pin(now + lease_s, lease_s, entry)
        self.nbytes += cost(name)
        return superseded

    def remove(self, names: Iterable[str]) -> list[int]:
        """Let names go; return the entries that pinned them."""
        entries = []
        for name in names:
            held = self._pins.pop(name, None)
            if held is not None:
                entries.append(held.entry)
                self.nbytes -= cost(name)
        return entries

    def entries(self) -> list[int]:
        """Return the store's entries that say what is pinned."""
        return [pin.entry for pin in self._pins.values()]

    def forget(self, entries: Set[int]) -> None:
        """Let names go that these entries pinned."""
        self.remove([name for name, pin in self._pins.items() if pin.entry in entries])

    def begin_anew(self, now: float) -> None:
        """Begin all leases anew."""
        for name, pin in self._pins.items():
            self._pins[name] = replace(pin, until=now + pin.lease_s)

    def expire(self, now: float) -> list[int]:
        """Let names go whose leases are over; return the entries that pinned them."""
        return self.remove([name for name, pin in self._pins.items() if pin.until <= now])


def cost(name: str) -> int:
    """Return the memory that a pin takes, about."""
    return text_bytes(name) + _OBJECT_BYTES
