"""The modules of a package, and which of them import which."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """Module ``source`` imports ``target``, both dotted names in the same package."""

    source: str
    target: str

    @property
    def is_upward(self) -> bool:
        """Whether a module imports a package that it lies in."""
        return self.source.startswith(self.target + ".")

    def level(self) -> tuple[str, str, str] | None:
        """Return (folder, child that imports, child that is imported) where the two part.

        None if one lies in the other.
        """
        a, b = self.source.split("."), self.target.split(".")
        shared = 0
        while shared < min(len(a), len(b)) and a[shared] == b[shared]:
            shared += 1
        if shared in (len(a), len(b)):
            return None
        return ".".join(a[:shared]), a[shared], b[shared]


class Package:
    """A package on disk, parsed once."""

    def __init__(self, root: Path) -> None:
        self.name = root.name
        self.files = {_dotted(root, path): path for path in sorted(root.rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    def modules_by_folder(self) -> dict[str, int]:
        """Return how many modules lie in each folder itself; its face is none of them."""
        counts: dict[str, int] = {}
        for path in self.files.values():
            folder = str(path.parent)
            counts[folder] = counts.get(folder, 0) + (path.name != "__init__.py")
        return counts

    def imports(self) -> Iterator[Import]:
        """Yield all imports within the package that run: those for type checkers do not."""
        for name, tree in self.trees.items():
            for target in _targets(tree):
                found = self._module(target)
                if found is not None and found != name:
                    yield Import(name, found)

    def _module(self, dotted: str) -> str | None:
        """Return the module that a dotted name of a module or of something in one is in."""
        parent = dotted.rpartition(".")[0]
        return dotted if dotted in self.files else parent if parent in self.files else None


def _dotted(root: Path, path: Path) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _targets(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports: `a.b` or `a.b.name`."""
    unused = {id(node) for block in _type_checking(tree) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in unused:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _type_checking(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from node.body
