"""Every mutation of a source file that mutmut's operators know.

mutmut's own runner leaves out constants of a module and functions with decorators, where this
project keeps its formats, bounds and properties; so its operators are applied here to the whole
file. Left out are imports, type annotations, type variables, decorators and docstrings, which
compute nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst import matchers
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

_NOT_COMPUTED = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom)
_TYPE_VARIABLE = matchers.Assign(value=matchers.Call(func=matchers.Name("TypeVar")))


@dataclass(frozen=True)
class Mutant:
    """A file with one change; ``before`` and ``after`` are the changed lines, not indented."""

    line: int
    before: str
    after: str
    source: str


def mutants_of(source: str) -> Iterator[Mutant]:
    """Yield the mutants of a file in the order of its lines."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    lines = wrapper.resolve(PositionProvider)
    seen = {source}
    for node in _computed(wrapper.module):
        for mutated in _mutations(node):
            text = _replaced(wrapper.module, node, mutated)
            if text not in seen:
                seen.add(text)
                yield _mutant(lines[node].start.line, source, text)


def _computed(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, _NOT_COMPUTED) or matchers.matches(node, _TYPE_VARIABLE):
        return
    yield node
    for child in node.children:
        yield from _computed(child)


def _mutations(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for kind, operator in mutation_operators:
        if isinstance(node, kind):
            yield from operator(node)


def _replaced(module: cst.Module, node: cst.CSTNode, mutated: cst.CSTNode) -> str:
    changed = module.deep_replace(node, mutated)
    assert isinstance(changed, cst.Module)
    return changed.code


def _mutant(line: int, source: str, text: str) -> Mutant:
    changes = list(difflib.ndiff(source.splitlines(), text.splitlines()))
    before, after = (
        " ".join(change[2:].strip() for change in changes if change.startswith(sign))
        for sign in ("- ", "+ ")
    )
    return Mutant(line, before, after, text)
