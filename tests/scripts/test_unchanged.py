"""The comparison of released and patched upstreams finds what differs, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from patches.config import select_target
from patches.format.series import load_series
from scripts.unchanged import training
from scripts.unchanged.measured import Failed, Measured, compare
from scripts.unchanged.sites import Site, make_sites
from scripts.unchanged.upstream_tests import read_outcomes

MOE_UTILS = "megatron/core/transformer/moe/moe_utils.py"
FOUR_TESTS = """
import pytest
def test_good(): pass
def test_bad(): raise KeyError("some/path")
def test_not_here(): pytest.skip("no GPU")
@pytest.fixture
def broken(): raise OSError("no disk")
def test_setup(broken): pass
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> tuple[Site, Site]:
    return make_sites("megatron-core", None, tmp_path_factory.mktemp("sites"))


@pytest.mark.server
def test_guidance_off_changes_no_bit_of_training_and_one_changed_line_is_found(
    sites: tuple[Site, Site], tmp_path: Path
) -> None:
    released, patched = sites
    changed = replace(patched, directory=tmp_path / "changed")
    shutil.copytree(patched.directory, changed.directory)
    file = changed.directory / MOE_UTILS
    text = file.read_text()
    scaled = text.replace("return output_tokens.to", "return (output_tokens * 1.01).to")
    assert scaled != text
    file.write_text(scaled)
    before, after, other = (
        training.measure(site, tmp_path, ranks=(1,)) for site in (released, patched, changed)
    )
    assert all(each.same for each in compare("training", before, after))
    assert not any(each.same for each in compare("training", before, other))


def test_the_two_copies_differ_in_the_files_of_the_series_alone(sites: tuple[Site, Site]) -> None:
    released, patched = (site.directory for site in sites)
    series = load_series(select_target("megatron-core"), sites[0].version)
    files = [path.relative_to(released) for path in released.rglob("*") if path.is_file()]
    differing = [f for f in files if (released / f).read_bytes() != (patched / f).read_bytes()]
    assert sorted(map(str, differing)) == sorted(series.paths)


def measured(**values: str) -> list[Measured]:
    return [Measured("m", values, "shown")]


@pytest.mark.parametrize(
    ("patched", "differences"),
    [
        ({"a": "0x1.0p+0", "b": "2"}, {}),
        ({"a": "0x1.0p+0", "b": "3"}, {"b": ("2", "3")}),
        ({"a": "0x1.0p+0"}, {"b": ("2", "absent")}),
        ({"a": "0x1.0p+0", "b": "2", "c": "1"}, {"c": ("absent", "1")}),
    ],
)
def test_a_value_that_differs_or_is_absent_is_a_difference(
    patched: dict[str, str], differences: dict[str, tuple[str, str]]
) -> None:
    (found,) = compare("part", measured(a="0x1.0p+0", b="2"), measured(**patched))
    assert found.differences == differences
    assert found.same == (not differences)


def test_nothing_measured_is_not_equality() -> None:
    (found,) = compare("part", measured(), measured())
    assert not found.same
    with pytest.raises(Failed, match="released tree gave"):
        compare("part", measured(a="1"), [])


def test_outcomes_of_pytest_are_read_from_its_own_report(tmp_path: Path) -> None:
    (tmp_path / "test_four.py").write_text(FOUR_TESTS)
    results = tmp_path / "results.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        "--junitxml",
        str(results),
    ]
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, check=False, capture_output=True)
    outcomes = read_outcomes(results)
    assert [outcome.partition(":")[0] for outcome in outcomes.values()] == [
        "passed",
        "failed",
        "skipped",
        "error",
    ]
    assert not any("some/path" in outcome for outcome in outcomes.values())
