"""docs/code-map.md: one line per module, from the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bridge", "sglang_trace", "megatron_trace", "patches")
HEAD = """# Code map

Which module does what. Made by `python -m scripts.documents` from the modules' docstrings.
"""


def code_map() -> str:
    """Return the whole document."""
    sections = [HEAD]
    for package in PACKAGES:
        sections.append(f"## {package}\n")
        for folder in _folders(ROOT / package):
            sections.append("\n".join(_table(folder)))
    return "\n".join(sections)


def _folders(package: Path) -> Iterator[Path]:
    """Yield the package and its folders that hold modules, in order."""
    for folder in [package, *sorted(path for path in package.rglob("*") if path.is_dir())]:
        if any(_modules(folder)):
            yield folder


def _modules(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.py") if file.name != "__init__.py")


def _table(folder: Path) -> Iterator[str]:
    name = folder.relative_to(ROOT)
    about = _first_sentence(folder / "__init__.py")
    yield f"### `{name}/`\n"
    if about:
        yield f"{about}\n"
    yield "| module | does |"
    yield "|---|---|"
    for module in _modules(folder):
        yield f"| `{module.stem}` | {_first_sentence(module)} |"
    yield ""


def _first_sentence(module: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) if module.is_file() else None
    paragraph = " ".join((docstring or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s+(?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(".:").replace("|", "\\|")
