"""The files of a series: the order in ``series`` and where the text of every patch is kept.

A line of ``series`` is the name of a file beside it, or ``../<version>/<name>`` for a text that
another version of the same target has too: a text is kept once. Who writes a series never changes
another one: a text that others share is handed over to them before it is changed or removed.
"""

import re
from collections import Counter
from pathlib import Path

from patches.config import Target
from patches.errors import PatchError

_LINE = re.compile(r"(\.\./\w[\w.+-]*/)?\w[\w.-]*\.patch")


def series_files(target: Target, version: str) -> dict[str, Path]:
    """The file of every patch by its name, in the order of application.

    PatchError if there is no series for ``version`` or its order is no order.
    """
    directory = target.series_dir / version
    if not (directory / "series").is_file():
        raise PatchError(
            f"{target.name} {version} has no series; there is one for: "
            f"{', '.join(target.versions()) or 'no version'}."
        )
    lines = _read_order(directory)
    names = [line.rpartition("/")[2] for line in lines]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not names:
        raise PatchError(f"a series lists every patch once and at least one; twice: {twice}.")
    return {name: directory / line for name, line in zip(names, lines, strict=True)}


def write_series_files(target: Target, version: str, contents: dict[str, bytes]) -> None:
    """Write the patches ``contents`` (by name, in order) as the series for ``version``.

    Files of patches that are no longer in the series are removed.
    """
    directory = target.series_dir / version
    directory.mkdir(parents=True, exist_ok=True)
    others = [other for other in target.versions() if other != version]
    for file in directory.glob("*.patch"):
        if contents.get(file.name) != file.read_bytes():
            _hand_over(target, file, others)
            file.unlink(missing_ok=True)
    order = []
    for name, content in contents.items():
        line = _same_text_elsewhere(target, directory, name, content, others) or name
        if line == name:
            (directory / name).write_bytes(content)
        order.append(f"{line}\n")
    (directory / "series").write_text("".join(order), "utf-8")


def _read_order(directory: Path) -> list[str]:
    text = (directory / "series").read_text("utf-8")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    order = [line for line in lines if line]
    for line in order:
        if not _LINE.fullmatch(line):
            raise PatchError(
                f"{directory / 'series'} lists {line!r}: write NAME.patch or ../VERSION/NAME.patch."
            )
    return order


def _same_text_elsewhere(
    target: Target, directory: Path, name: str, content: bytes, others: list[str]
) -> str | None:
    if (directory / name).exists():  # others may share this very file
        return None
    for other in reversed(others):
        file = target.series_dir / other / name
        if file.is_file() and file.read_bytes() == content:
            return f"../{other}/{name}"
    return None


def _hand_over(target: Target, file: Path, others: list[str]) -> None:
    """Move a patch file to the first of the other versions that share it, if there is one."""
    line = f"../{file.parent.name}/{file.name}"
    heir = ""
    for other in others:
        directory = target.series_dir / other
        order = _read_order(directory)
        if line not in order:
            continue
        if not heir:
            heir = f"../{other}/{file.name}"
            file.rename(directory / file.name)
            mine = file.name
        else:
            mine = heir
        replaced = [mine if each == line else each for each in order]
        (directory / "series").write_text("".join(f"{each}\n" for each in replaced), "utf-8")
