"""Whether the modules that Python really imports call our hooks.

`verify` compares files. This imports them and looks at the code objects that will run, so a stale
byte code file, a second copy of the package earlier on the path, or a plugin that replaces a
function is found as well. Where a hook must be called is read from the patched text itself.
"""

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


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


def call_sites(contents: Mapping[str, bytes], hooks: tuple[str, ...]) -> list[CallSite]:
    """Find every call ``<name ending in hooks>.<hook>(...)`` in patched files by path."""
    found = {
        CallSite(path, function, hook)
        for path, content in contents.items()
        for function, hook in _calls(ast.parse(content), "")
        if hook in hooks
    }
    return sorted(found)


def problem_of(call: CallSite, site: Path) -> str:
    """Import the module and say why the hook is not live there; empty if it is.

    ``site`` is where the module must come from.
    """
    try:
        module = importlib.import_module(call.module)
    except Exception as error:
        return f"{call.module} cannot be imported: {type(error).__name__}: {error}"
    file = Path(str(module.__file__))
    if not file.samefile(site / call.path):
        return f"{call.module} is imported from {file}"
    code = code_of(module, call.function)
    if code is None:
        return f"{call.module}.{call.function} is no Python function"
    return "" if call.hook in names_in(code) else f"{call.hook} is not called"


def code_of(module: ModuleType, function: str) -> CodeType | None:
    """The code of a function or method by qualified name, without its decorators.

    The code of the module itself if the name is empty. None if there is no such function.
    """
    if not function:
        loader: Any = module.__spec__.loader if module.__spec__ else None
        return loader.get_code(module.__name__) if hasattr(loader, "get_code") else None
    found: Any = module
    for name in function.split("."):
        found = getattr(found, name, None)
    code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
    return code if isinstance(code, CodeType) else None


def names_in(code: CodeType) -> set[str]:
    """Every global and attribute that a function and the functions inside it name."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """Function and hook of every call below ``node``; an inner function counts as its outer one."""
    for child in ast.iter_child_nodes(node):
        inside = function
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            inside = function if in_function else f"{function}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            door = child.func.value
            if isinstance(door, ast.Name) and door.id.endswith("hooks"):
                yield function, child.func.attr
        yield from _calls(child, inside)


def main() -> None:
    """Read the site and the calls as JSON from standard input; print problem by call as JSON."""
    asked = json.load(sys.stdin)
    calls = [CallSite(**each) for each in asked["calls"]]
    found = [asdict(call) | {"problem": problem_of(call, Path(asked["site"]))} for call in calls]
    # What an upstream prints while it is imported comes before this line.
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
