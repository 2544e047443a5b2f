"""The layout check finds what it is for, and the packages pass it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.house.__main__ import MAX_MODULES, PACKAGES, ROOT, broken, measure


def package(root: Path, files: dict[str, str]) -> Path:
    """Write a package of these files."""
    for name, text in files.items():
        path = root / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "pkg"


@pytest.mark.parametrize("name", PACKAGES)
def test_the_packages_have_room_and_imports_go_one_way(name: str) -> None:
    measured = measure(ROOT / name)
    assert broken(measured) == []
    assert measured["undocumented"] == []


def test_two_folders_that_import_each_other_are_a_circle(tmp_path: Path) -> None:
    files = {
        "low/__init__.py": "",
        "low/a.py": "from pkg.high import b",
        "high/__init__.py": "",
        "high/b.py": "def f():\n    import pkg.low.c",
        "low/c.py": "",
    }
    lines = broken(measure(package(tmp_path, {"__init__.py": "", **files})))
    assert lines == [
        "circle: pkg.high.b imports pkg.low.c, and low of pkg leads to high",
        "circle: pkg.low.a imports pkg.high.b, and high of pkg leads to low",
    ]


def test_modules_of_one_folder_that_import_each_other_are_a_circle(tmp_path: Path) -> None:
    files = {"__init__.py": "", "a.py": "import pkg.b", "b.py": "import pkg.c"}
    assert broken(measure(package(tmp_path, {**files, "c.py": ""}))) == []
    assert len(broken(measure(package(tmp_path, {**files, "c.py": "import pkg.a"})))) == 3


def test_an_import_for_type_checkers_closes_no_circle(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pkg.a\n"
    files = {"__init__.py": "", "a.py": "import pkg.b", "b.py": typed}
    assert broken(measure(package(tmp_path, files))) == []


def test_a_module_that_imports_the_package_it_lies_in_is_upward(tmp_path: Path) -> None:
    files = {"__init__.py": "name = 1", "low/__init__.py": "", "low/a.py": "from pkg import name"}
    assert broken(measure(package(tmp_path, files))) == ["upward import: pkg.low.a imports pkg"]


def test_a_full_folder_is_named(tmp_path: Path) -> None:
    files = {f"m{number}.py": "" for number in range(MAX_MODULES + 1)}
    (line,) = broken(measure(package(tmp_path, {"__init__.py": "", **files})))
    assert line.startswith(f"pkg has {MAX_MODULES + 1} modules")


def test_public_functions_without_a_docstring_are_counted(tmp_path: Path) -> None:
    text = "def f(): ...\ndef _g(): ...\nclass C:\n    def h(self): ...\n"
    measured = measure(package(tmp_path, {"__init__.py": "", "a.py": text}))
    assert measured["undocumented"] == ["pkg.a.C.h", "pkg.a.f"]
