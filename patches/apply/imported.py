"""Where Python would import a target from, without importing anything."""

import importlib.util
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from patches.apply.tree import Checkout
from patches.config import Target


def imported_from(target: Target) -> Path | Checkout | None:
    """The site-packages directory or the source tree that is first on this interpreter's path.

    None if there is no such package. A directory without the RECORD of a wheel is a source tree:
    a clone on PYTHONPATH or an editable installation.
    """
    spec = _find_spec(target.package.split("/"))
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    site = package.parents[target.package.count("/")]
    installed = metadata.distributions(name=target.distribution, path=[str(site)])
    return site if any(found.read_text("RECORD") for found in installed) else Checkout(site)


def _find_spec(names: list[str]) -> ModuleSpec | None:
    """Find a package without importing its parents, as `importlib.util.find_spec` would."""
    spec = importlib.util.find_spec(names[0])
    for length in range(2, len(names) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        places = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(".".join(names[:length]), places)
    return spec
