"""Every series in the repository, against the real release it was made for."""

import ast
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from patches import verify_target
from patches.apply import edit
from patches.apply.report import report
from patches.apply.upstream import read_or_none
from patches.config import ROOT, Target, load_targets
from patches.format.hashes import git_blob, sha256
from patches.format.series import Series, load_series
from patches.format.series_files import series_files
from patches.maintain.export import export_series, file_name

SERIES = [
    pytest.param(target, version, id=f"{target.name}-{version}")
    for target in load_targets().values()
    for version in target.versions()
]
HOOK_CALL = re.compile(rb"\b\w*hooks\.([A-Za-z]\w*)")
LINE_LIMIT = 60


@pytest.fixture
def series(target: Target, version: str) -> Series:
    return load_series(target, version)


@pytest.fixture
def site(target: Target, version: str, series: Series, tmp_path, released) -> Path:
    """A site-packages directory with the files of the series and the metadata of the release.

    They come from the published file, whose hash is that of config.json.
    """
    with zipfile.ZipFile(released(target, version)) as wheel:
        wanted = set(series.paths)
        names = [n for n in wheel.namelist() if n in wanted or ".dist-info/" in n]
        wheel.extractall(tmp_path / "site", names)
    return tmp_path / "site"


@pytest.fixture
def pristine(series: Series, site: Path) -> dict[str, bytes | None]:
    return {path: read_or_none(site / path) for path in series.paths}


def files(directory: Path) -> dict[str, str]:
    found: Iterator[Path] = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256(path.read_bytes()) for path in found}


def test_every_target_has_a_series():
    assert {param.values[0].name for param in SERIES} == set(load_targets())


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_every_patch_file_is_in_the_order_and_named_after_its_subject(target, version, series):
    directory = target.series_dir / version
    listed = {file for file in series_files(target, version).values() if file.parent == directory}
    assert listed == set(directory.iterdir()) - {directory / "series"}
    assert [patch.name for patch in series.patches] == [file_name(p) for p in series.patches]


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_the_hooks_trailer_lists_what_the_added_lines_call(target, version, series):
    for patch in series.patches:
        added = b"".join(line for d in patch.diffs for h in d.hunks for line in h.added)
        called = {name.decode() for name in HOOK_CALL.findall(added)}
        assert (patch.name, called) == (patch.name, set(patch.hooks))


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_every_hook_is_a_public_function_of_the_one_door(target, version, series):
    door = ast.parse((ROOT.parent / target.hooks).read_bytes())
    functions = {node.name for node in door.body if isinstance(node, ast.FunctionDef)}
    assert set(series.hooks) <= functions


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_hook_patches_stay_within_the_line_limit(target, version, series):
    assert 0 < series.edited_lines()["hooks"] <= LINE_LIMIT


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_status_counts_the_edited_lines_of_both_groups(target, version, series, site):
    counted = dict.fromkeys(("hooks", "cpu"), 0)
    for patch in series.patches:
        text = series_files(target, version)[patch.name].read_text("utf-8")
        edits = re.findall(r"^(?:\+(?!\+\+ b/)|-(?!-- (?:a/|/dev/null)|--?$))", text, re.MULTILINE)
        counted[patch.group] += len(edits)
    assert report(target, site).edited_lines == {k: n for k, n in counted.items() if n}


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_the_results_are_git_s_own_and_valid_python(target, version, series, pristine):
    current = dict(pristine)
    for patch in series.patches:
        for diff in patch.diffs:
            current[diff.path] = diff.apply(current[diff.path])
            assert git_blob(current[diff.path]) == diff.blobs[1], f"{patch.name}: {diff.path}"
            ast.parse(current[diff.path], diff.path)


@pytest.mark.parametrize(("target", "version"), SERIES)
def test_apply_and_revert_leave_the_real_files_byte_identical(target, version, series, site):
    before = files(site)
    assert edit.apply(target, site)
    verify_target(target.name, site=site)
    after = files(site)
    assert {path for path in series.paths if before.get(path) != after[path]} == set(series.paths)
    assert edit.revert(target, site)
    assert files(site) == before


@pytest.mark.skipif(shutil.which("git") is None, reason="export needs git")
@pytest.mark.parametrize(("target", "version"), SERIES)
def test_import_and_export_give_the_same_bytes(target, version, series, site, tmp_path):
    me = {f"GIT_{r}_{k}": "a@b.c" for r in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}

    def git(*arguments: str) -> None:
        command = ["git", "-C", str(site), *arguments]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **me})

    git("init")
    git("add", "--all")
    git("commit", "--message", "released")
    git("tag", "base")
    sources = series_files(target, version)
    git("am", "--keep-cr", *map(str, sources.values()))
    copy = replace(target, series_dir=tmp_path / "out")
    export_series(copy, version, site, "base")
    for patch in series.patches:
        exported = (tmp_path / "out" / version / patch.name).read_bytes()
        assert exported == sources[patch.name].read_bytes(), patch.name
