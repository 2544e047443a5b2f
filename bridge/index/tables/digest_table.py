"""Digests of quantized weights, by weight version and engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import chain, islice
from sys import intern
from typing import Self

from bridge.index.tables.saved import Saved, Snapshot, integers, lengths, lists, texts
from bridge.index.tables.sizes import text_bytes
from bridge.wire import WeightDigests

_ITEM_BYTES = 100  # the place of two strings in a dict


@dataclass(slots=True)
class _Version:
    step: int = 0
    entries: list[int] = field(default_factory=list)
    by_engine: dict[str, dict[str, str]] = field(default_factory=dict)
    nbytes: int = 0


class DigestTable:
    """What every engine reported of its weights; ``nbytes`` is the memory that takes, about."""

    def __init__(self) -> None:
        self._versions: dict[str, _Version] = {}
        self.nbytes = 0

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: columns of versions, of their engines, of their digests.

        ``engines`` and ``tensors`` say how many there are of each version and of each engine.
        """
        versions = self._versions.values()
        reports = [report for held in versions for report in held.by_engine.values()]
        return {
            "versions": texts(self._versions),
            "steps": integers(held.step for held in versions),
            "entries": lists([held.entries for held in versions]),
            "engines": lengths(held.by_engine for held in versions),
            "engine_ids": texts([name for held in versions for name in held.by_engine]),
            "tensors": lengths(reports),
            "tensor_names": texts(list(chain.from_iterable(reports))),
            "digests": texts([digest for report in reports for digest in report.values()]),
        }

    @classmethod
    def restore(cls, saved: Saved) -> Self:
        """Make again what gave a snapshot."""
        made = cls()
        by_engine = _reports(saved)
        columns = saved.texts("versions"), saved.integers("steps"), saved.lists("entries")
        for name, step, entries, engines in zip(*columns, saved.integers("engines"), strict=True):
            held = _Version(step, entries, dict(islice(by_engine, engines)))
            held.nbytes = sum(map(digest_bytes, held.by_engine.values()))
            made._versions[name] = held
            made.nbytes += held.nbytes
        return made

    def get(self, weight_version: str) -> Mapping[str, Mapping[str, str]]:
        """Return engine -> tensor name -> digest, the engine that reported last standing last."""
        held = self._versions.get(weight_version)
        return {} if held is None else held.by_engine

    def put(self, told: WeightDigests, number: int, step: int) -> None:
        """Join a report, the store's entry ``number``, with what the engine said before."""
        # Versions stand in the order of their last report.
        held = self._versions.pop(told.weight_version, None) or _Version()
        self._versions[told.weight_version] = held
        earlier = held.by_engine.pop(told.engine_id, {})
        again = {name: earlier[name] for name in told.digests.keys() & earlier.keys()}
        added = digest_bytes(told.digests) - digest_bytes(again)
        held.nbytes += added
        self.nbytes += added
        held.by_engine[told.engine_id] = {**earlier, **told.digests}
        held.entries.append(number)
        held.step = step

    def steps(self) -> set[int]:
        """Return the RL steps in which versions were last reported."""
        return {held.step for held in self._versions.values()}

    def entries(self) -> list[int]:
        """Return the store's entries that hold the reports."""
        return [entry for held in self._versions.values() for entry in held.entries]

    def forget(self, entries: set[int]) -> bool:
        """Forget versions whose reports are gone; return False if a part of one is."""
        for name, held in list(self._versions.items()):
            lost = entries.intersection(held.entries)
            if lost and len(lost) < len(held.entries):
                return False
            if lost:
                self.nbytes -= self._versions.pop(name).nbytes
        return True

    def drop(self, steps: Set[int]) -> list[int]:
        """Forget versions last reported in these steps, but not the newest; return entries."""
        old = [name for name, held in list(self._versions.items())[:-1] if held.step in steps]
        numbers: list[int] = []
        for name in old:
            held = self._versions.pop(name)
            self.nbytes -= held.nbytes
            numbers += held.entries
        return numbers


def _reports(saved: Saved) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (engine, what it reported) version by version."""
    # Engines name the same tensors.
    names = map(intern, saved.texts("tensor_names"))
    digests = zip(names, saved.texts("digests"), strict=True)
    for engine, tensors in zip(saved.texts("engine_ids"), saved.integers("tensors"), strict=True):
        yield engine, dict(islice(digests, tensors))


def digest_bytes(digests: Mapping[str, str]) -> int:
    """Return the memory that digests take, about."""
    return sum(text_bytes(name) + text_bytes(digests[name]) + _ITEM_BYTES for name in digests)
