"""Which upstream functions must call which hook, read from the patched text itself."""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from patches.apply.state import State, Where, inspect, require_upstream, series_for
from patches.config import Target
from patches.errors import PatchError, file_errors_explained


@dataclass(frozen=True, order=True)
class CallSite:
    """A hook that ``function`` of the file ``path`` must call.

    ``function`` is a qualified name, a method's with its class, and empty at module level.
    """

    path: str
    function: str
    hook: str

    @property
    def module(self) -> str:
        """Dotted name of the module in the file."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def hook_sites(
    target: Target, where: Where = None, wanted: Callable[[str], bool] = lambda hook: True
) -> list[CallSite]:
    """Every call of a wanted hook in a target that is patched with the current series.

    Reads the files that the series edits and imports nothing of the upstream.

    Raises:
        PatchError: it is in any other state; the message names the command that fixes it.
    """
    with file_errors_explained():
        upstream = require_upstream(target, where)
        series = series_for(target, upstream)
        found = inspect(target, upstream, series)
        if series is None or found.state is not State.PATCHED:
            raise PatchError(found.remedy())
        paths = {diff.path for patch in series.patches if patch.hooks for diff in patch.diffs}
        contents = {path: upstream.current(path) or b"" for path in paths}
    return call_sites(contents, [hook for hook in series.hooks if wanted(hook)])


def call_sites(contents: Mapping[str, bytes], hooks: Collection[str]) -> list[CallSite]:
    """Find every call ``<name ending in hooks>.<hook>(...)`` in patched files by path."""
    names = "|".join(map(re.escape, hooks))
    use = re.compile(rf"hooks\.(?:{names})\b".encode())
    sites: set[CallSite] = set()
    for path, content in contents.items():
        lines = [n for n, line in enumerate(content.split(b"\n"), 1) if use.search(line)]
        calls = _calls(ast.parse(content), "", lines) if lines else ()
        sites |= {CallSite(path, function, hook) for function, hook in calls if hook in hooks}
    return sorted(sites)


def _calls(node: ast.AST, function: str, lines: list[int]) -> Iterator[tuple[str, str]]:
    """Function and hook of every call below ``node``; an inner function counts as its outer one.

    Statements that cover none of ``lines`` are passed over, which is most of a file.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and not _covers(child, lines):
            continue
        if isinstance(child, ast.ClassDef):
            yield from _calls(child, f"{function}.{child.name}".lstrip("."), lines)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{function}.{child.name}".lstrip(".")
            yield from ((name, hook) for _, hook in _calls(child, name, lines))
        else:
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                module = child.func.value
                if isinstance(module, ast.Name) and module.id.endswith("hooks"):
                    yield function, child.func.attr
            yield from _calls(child, function, lines)


def _covers(statement: ast.stmt, lines: list[int]) -> bool:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(each.lineno for each in decorators)])
    return any(first <= line <= (statement.end_lineno or first) for line in lines)
