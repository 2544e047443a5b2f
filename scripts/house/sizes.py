"""How long files and functions are, and which public functions say nothing of themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from scripts.house.modules import Package

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Sizes:
    """In lines; ``undocumented`` has the dotted names of public functions without a docstring."""

    lines: int
    median_file: float
    largest_file: int
    median_function: float
    largest_function: int
    undocumented: list[str]


def sizes(package: Package) -> Sizes:
    """Measure all files of a package."""
    files = [len(path.read_text().splitlines()) for path in package.files.values()]
    functions = [
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in package.trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]
    return Sizes(
        lines=sum(files),
        median_file=median(files),
        largest_file=max(files),
        median_function=median(functions or [0]),
        largest_function=max(functions, default=0),
        undocumented=sorted(
            f"{name}.{function}"
            for name, tree in package.trees.items()
            for function in _undocumented(tree)
        ),
    )


def _undocumented(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Yield public functions and methods of public classes; overloads and setters need none."""
    for child in node.body:
        if isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _undocumented(child, f"{prefix}{child.name}.")
        elif isinstance(child, Function) and _lacks_docstring(child):
            yield prefix + child.name


def _lacks_docstring(function: Function) -> bool:
    if function.name.startswith("_") or ast.get_docstring(function) is not None:
        return False
    names = {ast.unparse(each) for each in function.decorator_list}
    return not any(name in ("overload", "override") or name.endswith(".setter") for name in names)
