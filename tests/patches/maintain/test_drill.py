"""Conflict drills on real releases: real text, pip and git. The repository stays as it is."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from patches import cli
from patches.config import ROOT, Target, load_targets, select_target
from patches.format.patchfile import Patch
from patches.format.series import Series, load_series
from patches.format.series_files import series_files, write_series_files
from patches.maintain import commands
from patches.maintain.conflict import HOOK_CALL
from patches.maintain.git import git_lines
from patches.maintain.rebase import nearest_version
from patches.maintain.release import python_files

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="rebase needs git")

SGLANG = load_targets()["sglang"]
NEWEST = SGLANG.versions()[-1]


@pytest.fixture
def target(tmp_path) -> Target:
    """A copy of the series of SGLang to work on."""
    shutil.copytree(SGLANG.series_dir, tmp_path / "patches" / "sglang")
    shutil.copy(ROOT / "config.json", tmp_path / "patches")
    return load_targets(tmp_path / "patches")["sglang"]


@pytest.fixture
def rebase(target, tmp_path, monkeypatch) -> Callable[..., Result]:
    """The command, on the copy."""
    root = target.series_dir.parent
    monkeypatch.setattr(commands, "select_target", partial(select_target, root=root))
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["rebase", "sglang", *arguments])

    return invoke


@pytest.fixture
def work(tmp_path) -> Path:
    return tmp_path / "out" / "rebase" / "sglang"


def use_as_index(directory: Path, monkeypatch) -> None:
    """Let pip see the files of a directory and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))


def keep_only(target: Target, version: str) -> None:
    """Drop all series but one."""
    texts = {name: file.read_bytes() for name, file in series_files(target, version).items()}
    for other in target.versions():
        shutil.rmtree(target.series_dir / other)
    write_series_files(target, version, texts)


def forget_releases(target: Target) -> None:
    """Take the hashes out of the configuration, because the wheels are not the published ones."""
    file = target.series_dir.parent / "config.json"
    config = json.loads(file.read_text())
    config["sglang"]["releases"] = {}
    file.write_text(json.dumps(config))


def repository() -> dict[Path, bytes]:
    files = (p for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {path: path.read_bytes() for path in files if path.suffix != ".py"}


def assert_exact(series: Series, released: dict[str, bytes], hooks: tuple[str, ...]) -> None:
    """The series applies strictly to the release, gives valid Python and calls every hook."""
    for path, text in series.results({p: released.get(p) for p in series.paths}).items():
        compile(text, path, "exec", dont_inherit=True)
    assert series.hooks == hooks


def assert_actionable(work: Path, report: dict, tree: Path) -> None:
    """A person finds every place, both sides and the hook, without looking anything up."""
    assert report["conflicts"]
    assert not report["hooks"] or any(each["hooks"] for each in report["conflicts"])
    text = (work / "conflict.md").read_text()
    unmerged = git_lines(tree, "diff", "--name-only", "--diff-filter=U")
    assert {each["path"] for each in report["conflicts"]} == set(unmerged)
    for conflict in report["conflicts"]:
        sides = conflict["sides"]
        assert sides["patch"] != sides["base"]
        assert f"## {conflict['path']}, line {sides['line']}" in text
        added = [line for line in sides["patch"] if line not in sides["base"]]
        assert all(line in text for line in (*added, *sides["release"], *conflict["hooks"]))
        if not conflict["deleted"]:
            lines = (tree / conflict["path"]).read_text().split("\n")
            assert lines[sides["line"] - 1].startswith("<<<<<<< ")


@pytest.mark.parametrize("version", ["0.5.22", "0.5.20"])
def test_a_release_without_series_is_reached_from_its_neighbour_without_hands(
    target, rebase, work, released, monkeypatch, version
):
    source = nearest_version(target, version)
    files = {each: released(SGLANG, each) for each in (source, version)}
    use_as_index(files[version].parent, monkeypatch)
    before = repository()
    result = rebase("--to", version)
    assert result.exit_code == 0, result.output
    new = dict(python_files(files[version], "sglang"))
    assert_exact(load_series(target, version), new, load_series(target, source).hooks)
    made_for = load_targets(target.series_dir.parent)["sglang"].releases[version]
    assert made_for.file == files[version].name
    assert not work.exists()
    assert repository() == before


@pytest.fixture
def texts(released, read_wheel) -> Callable[[str], dict[str, bytes]]:
    """Of a real release the files that any series edits: enough to merge, and quick."""
    paths = {p for v in SGLANG.versions() for p in load_series(SGLANG, v).paths}
    return lambda version: read_wheel(released(SGLANG, version), sorted(paths))


def test_all_newer_walks_from_release_to_release(
    target, rebase, work, texts, make_wheel, tmp_path, monkeypatch
):
    keep_only(target, "0.5.21")
    forget_releases(target)
    walk = ["0.5.21", "0.5.22", "0.5.23"]
    for version in walk:
        make_wheel(tmp_path / "index", "sglang", version, texts(version))
    use_as_index(tmp_path / "index", monkeypatch)
    hooks = load_series(target, "0.5.21").hooks
    result = rebase("--all-newer")
    reached = target.versions()
    assert reached == walk[: len(reached)]
    for version in reached:
        assert_exact(load_series(target, version), texts(version), hooks)
    if reached == walk:
        assert result.exit_code == 0, result.output
    else:
        breaks = walk[len(reached)]
        assert f"does not merge with {breaks}: read" in result.stderr
        assert_actionable(work, json.loads((work / "conflict.json").read_text()), work / "tree")


def test_a_release_that_is_too_far_stops_with_a_report_that_a_person_can_act_on(
    target, rebase, work, texts, make_wheel, tmp_path, monkeypatch
):
    keep_only(target, "0.5.21")
    forget_releases(target)
    for version in ("0.5.21", "0.5.17"):
        make_wheel(tmp_path / "index", "sglang", version, texts(version))
    use_as_index(tmp_path / "index", monkeypatch)
    result = rebase("--to", "0.5.17")
    assert result.exit_code == 1
    assert f"does not merge with 0.5.17: read {work}/conflict.md, solve it in" in result.stderr
    assert_actionable(work, json.loads((work / "conflict.json").read_text()), work / "tree")
    assert target.versions() == ["0.5.21"]


def test_a_real_conflict_is_reported_and_finished_by_hand(
    target, rebase, work, texts, make_wheel, tmp_path, monkeypatch
):
    """A release in which somebody has changed the line above one of our calls."""
    forget_releases(target)
    series = load_series(target, NEWEST)
    patch = next(each for each in series.patches if "report-the-pool" in each.name)
    path, above, call = line_above_the_call(patch)
    (hook,) = HOOK_CALL.findall(call.decode())
    new_line = above.rstrip(b"\n") + b"  # reworded upstream\n"
    old = texts(NEWEST)
    assert old[path].count(above) == 1
    new = old | {path: old[path].replace(above, new_line)}
    make_wheel(tmp_path / "index", "sglang", NEWEST, old)
    make_wheel(tmp_path / "index", "sglang", "99.0", new)
    use_as_index(tmp_path / "index", monkeypatch)

    before = repository()
    result = rebase("--to", "99.0")
    assert result.exit_code == 1
    report = json.loads((work / "conflict.json").read_text())
    assert report["patch"] == patch.name
    (conflict,) = report["conflicts"]
    assert (conflict["path"], conflict["hooks"]) == (path, [hook])
    assert new_line.decode().rstrip("\n") in conflict["sides"]["release"]
    assert call.decode().rstrip("\n") in conflict["sides"]["patch"]
    assert_actionable(work, report, work / "tree")
    assert "still has conflict markers" in rebase("--continue").stderr

    solved = dict(load_series(target, NEWEST).results(old))[path].replace(above, new_line)
    (work / "tree" / path).write_bytes(solved)
    result = rebase("--continue")
    assert result.exit_code == 0, result.output
    assert "solved by hand" in result.stdout
    made = load_series(target, "99.0")
    assert_exact(made, new, series.hooks)
    assert made.results({p: new.get(p) for p in made.paths})[path] == solved
    assert not work.exists()
    assert repository() == before


def line_above_the_call(patch: Patch) -> tuple[str, bytes, bytes]:
    """Path, the context line before the first added call of a hook, and that call."""
    for diff in patch.diffs:
        for hunk in diff.hunks:
            for above, line in zip(hunk.new, hunk.new[1:], strict=False):
                called = any(b"hooks.%s(" % hook.encode() in line for hook in patch.hooks)
                if line in hunk.added and called and above not in hunk.added and b"(" in above:
                    return diff.path, above, line
    raise AssertionError(f"{patch.name} has no call below a line of the release")
