"""Write the documents that are made from the code: docs/code-map.md and docs/configuration.md.

`python -m scripts.documents` writes them; `--check` exits with 1 if one is not as the code has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from scripts.documents.code_map import code_map
from scripts.documents.configuration import configuration

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generated() -> dict[Path, str]:
    """Return the text of every generated document."""
    return {DOCS / "code-map.md": code_map(), DOCS / "configuration.md": configuration()}


def main() -> int:
    """Write the documents, or compare them."""
    stale = [path for path, text in generated().items() if not is_current(path, text)]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"docs/{path.name} is not as the code has it: run python -m scripts.documents")
        return 1 if stale else 0
    for path, text in generated().items():
        path.write_text(text)
    return 0


def is_current(path: Path, text: str) -> bool:
    """Return whether a document holds this text."""
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
