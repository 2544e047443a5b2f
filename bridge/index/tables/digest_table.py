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

_ITEM_BYTES = 100  # two strings as an item of a dict


@dataclass(slots=True)
class _Version:
    step: int = 0
    entries: list[int] = field(default_factory=list)
    by_engine: dict[str, dict[str, str]] = field(default_factory=dict)
    nbytes: int = 0


class DigestTable:
    """The weight digests that every engine reported; ``nbytes`` is their approximate memory."""

    def __init__(self) -> None:
        self._versions: dict[str, _Version] = {}
        self.nbytes = 0

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint keeps: columns of versions, engines and digests.

        ``engines`` has the number of engines per version, ``tensors`` the tensors per engine.
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
        """Return the table of a snapshot."""
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
        """Return engine -> tensor name -> digest; the last item reported last."""
        held = self._versions.get(weight_version)
        return {} if held is None else held.by_engine

    def put(self, record: WeightDigests, number: int, step: int) -> None:
        """Merge a report, store entry ``number``, with the engine's earlier reports."""
        # Versions are in the order of their last report.
        held = self._versions.pop(record.weight_version, None) or _Version()
        self._versions[record.weight_version] = held
        earlier = held.by_engine.pop(record.engine_id, {})
        again = {name: earlier[name] for name in record.digests.keys() & earlier.keys()}
        added = digest_bytes(record.digests) - digest_bytes(again)
        held.nbytes += added
        self.nbytes += added
        held.by_engine[record.engine_id] = {**earlier, **record.digests}
        held.entries.append(number)
        held.step = step

    def steps(self) -> set[int]:
        """Return the RL steps in which versions were last reported."""
        return {held.step for held in self._versions.values()}

    def entries(self) -> list[int]:
        """Return the store entries of the reports."""
        return [entry for held in self._versions.values() for entry in held.entries]

    def forget(self, entries: set[int]) -> bool:
        """Forget versions whose entries are deleted; return False if only some of one are."""
        for name, held in list(self._versions.items()):
            lost = entries.intersection(held.entries)
            if lost and len(lost) < len(held.entries):
                return False
            if lost:
                self.nbytes -= self._versions.pop(name).nbytes
        return True

    def delete(self, steps: Set[int]) -> list[int]:
        """Delete versions last reported in these steps, except the newest; return entries."""
        old = [name for name, held in list(self._versions.items())[:-1] if held.step in steps]
        numbers: list[int] = []
        for name in old:
            held = self._versions.pop(name)
            self.nbytes -= held.nbytes
            numbers += held.entries
        return numbers


def _reports(saved: Saved) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (engine, its digests) in the order of the versions."""
    # Engines name the same tensors.
    names = map(intern, saved.texts("tensor_names"))
    digests = zip(names, saved.texts("digests"), strict=True)
    for engine, tensors in zip(saved.texts("engine_ids"), saved.integers("tensors"), strict=True):
        yield engine, dict(islice(digests, tensors))


def digest_bytes(digests: Mapping[str, str]) -> int:
    """Return the memory that digests take, about."""
    return sum(text_bytes(name) + text_bytes(digests[name]) + _ITEM_BYTES for name in digests)
