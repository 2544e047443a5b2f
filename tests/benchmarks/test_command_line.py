"""A result names its command, not the machine's folders."""

from __future__ import annotations

from benchmarks.command_line import command_line


def test_of_an_absolute_path_the_name_stays() -> None:
    given = ["--out", "/somewhere/deep/result.json", "--steps", "12", "--folder", "here/too"]
    assert command_line("benchmarks.a", given) == (
        "python -m benchmarks.a --out result.json --steps 12 --folder here/too"
    )
