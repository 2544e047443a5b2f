"""Whether the modules that Python really imports call our hooks.

`verify` compares files. This imports them and looks at the code objects that will run, so a stale
byte code file, a second copy of the package earlier on the path, or a plugin that replaces a
function is found as well. Which function must call which hook is read from the patched text.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from patches.apply.state import require_upstream
from patches.check.sites import CallSite, hook_sites
from patches.config import select_target
from patches.errors import PatchError


def require_live_hooks(name: str, wanted: Callable[[str], bool] = lambda hook: True) -> None:
    """Check that what this process imports of target ``name`` calls the wanted hooks.

    Modules that call none of them are not imported, so a process that runs only a part of the
    upstream wants only its own.

    Raises:
        PatchError: it is not patched, or something else than the patched function runs; with the
            command that fixes it.
    """
    target = select_target(name)
    site = require_upstream(target).site
    for call in hook_sites(target, wanted=wanted):
        if problem := problem_of(call, site):
            caller = f"{call.module}.{call.function}".rstrip(".")
            raise PatchError(
                f"{caller} does not call our hook {call.hook} ({problem}): run `python -m patches "
                f"apply {name}`; if it is patched already, remove other copies of the package and "
                f"plugins that replace the function (`python -m patches doctor {name}` finds them)."
            )


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
    if is_left_out(call):
        return ""
    code = code_of(module, call.function)
    if code is None:
        return f"{call.module}.{call.function} is no Python function"
    return "" if call.hook in names_in(code) else f"{call.hook} is not called"


def is_left_out(call: CallSite) -> bool:
    """Whether the imported module has None in place of the class that should call the hook.

    Upstreams write that where an optional dependency is missing; nothing can run there then.
    """
    owner, _, method = call.function.partition(".")
    module = sys.modules.get(call.module)
    return bool(method) and module is not None and getattr(module, owner, owner) is None


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
