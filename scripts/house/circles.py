"""Circles among the children of each folder: two parts of a package that import each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from scripts.house.modules import Import

Graph = Mapping[str, set[str]]


def circles(imports: Iterable[Import]) -> list[str]:
    """Return a line for every import that closes a circle among a folder's children."""
    found = list(imports)
    graphs: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in found:
        level = each.level()
        if level is not None:
            folder, source, target = level
            graphs[folder][source].add(target)
    return sorted({line for each in found for line in _closing(each, graphs)})


def _closing(each: Import, graphs: Mapping[str, Graph]) -> Iterator[str]:
    level = each.level()
    if level is None:
        return
    folder, source, target = level
    if source in _reached(graphs[folder], target):
        yield f"{each.source} imports {each.target}, and {target} of {folder} leads to {source}"


def _reached(graph: Graph, start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for child in graph.get(waiting.pop(), set()) - reached:
            reached.add(child)
            waiting.append(child)
    return reached
