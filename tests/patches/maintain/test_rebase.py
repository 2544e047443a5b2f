"""Conflict drills on tiny releases. The package index is a directory; nothing is downloaded."""

import json
import shutil
import subprocess
import zipfile
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from patches import cli
from patches.config import load_targets, select_target
from patches.errors import PatchError
from patches.format.series import load_series
from patches.maintain import commands, release
from patches.maintain.rebase import Rebase, nearest_version

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="rebase needs git")

ENGINE, MODEL = "demo/core/engine.py", "demo/core/model.py"
OLD = {
    ENGINE: "import os\n\n\ndef start(job):\n    begin(job)\n    return job\n\n\n"
    "def begin(job):\n    job.ready = True\n    job.run()\n\n\ndef stop(job):\n    job.end()\n",
    MODEL: "SIZE = 1\n\n\ndef size():\n    return SIZE\n",
}
REPORTED = OLD[ENGINE].replace("    job.run()\n", "    trace_hooks.on_begin(job)\n    job.run()\n")
BIGGER = OLD[MODEL].replace("SIZE = 1", "SIZE = 2")
NEWS = "# news\n" * 5


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A directory of wheels in the place of pip's package index."""
    index = tmp_path / "index"
    index.mkdir()

    def download(_target, version: str, into: Path, **_) -> Path:
        into.mkdir(parents=True)
        return Path(shutil.copy(index / f"demo-{version}-py3-none-any.whl", into))

    def published(_target) -> list[str]:
        return sorted(path.name.split("-")[1] for path in index.iterdir())

    monkeypatch.setattr(release, "download", download)
    monkeypatch.setattr(commands, "published_versions", published)
    return index


def publish(index: Path, version: str, **changes: str) -> None:
    """Write the wheel of a release: the old files, with ``engine`` or ``model`` replaced."""
    files = OLD | {f"demo/core/{name}.py": text for name, text in changes.items()}
    info = f"demo-{version}.dist-info"
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(index / f"demo-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            if text:
                wheel.writestr(path, text)


@pytest.fixture
def releases(world, index, unified, patch_file) -> Path:
    """Release 1.2.0 is published and has a series of two patches."""
    publish(index, "1.2.0")
    engine = unified(ENGINE, OLD[ENGINE].encode(), REPORTED.encode())
    model = unified(MODEL, OLD[MODEL].encode(), BIGGER.encode())
    for file in world.series_dir.iterdir():
        file.unlink()
    world.write_series(
        **{
            "engine-report": patch_file("engine: report", engine, hooks="on_begin"),
            "model-grow": patch_file("model: grow", model, group="cpu"),
        }
    )
    return index


@pytest.fixture
def rebase(world, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "select_target", partial(select_target, root=world.root))
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, ["rebase", "demo", *arguments])

    return invoke


@pytest.fixture
def work(tmp_path) -> Path:
    return tmp_path / "out" / "rebase" / "demo"


def results(world, version: str, **changes: str) -> dict[str, str]:
    """What the series for ``version`` makes of its release, applied strictly."""
    series = load_series(load_targets(world.root)["demo"], version)
    files = OLD | {f"demo/core/{name}.py": text for name, text in changes.items()}
    found = series.results({path: files[path].encode() for path in series.paths})
    return {path: content.decode() for path, content in found.items()}


def outcomes(result: Result) -> dict[str, str]:
    rows = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    return {row[1].strip(): row[2].strip() for row in rows}


def files(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.usefixtures("releases")
def test_moved_lines_are_followed_and_the_new_series_is_exact(world, index, rebase, work):
    publish(index, "1.3.0", engine=NEWS + OLD[ENGINE])
    result = rebase("--to", "1.3.0")
    assert result.exit_code == 0, result.output
    assert outcomes(result) == {
        "engine-report.patch": "other line numbers",
        "model-grow.patch": "same text",
    }
    assert results(world, "1.3.0", engine=NEWS + OLD[ENGINE]) == {
        ENGINE: NEWS + REPORTED,
        MODEL: BIGGER,
    }
    made_for = load_targets(world.root)["demo"].releases["1.3.0"]
    assert made_for.file == "demo-1.3.0-py3-none-any.whl"
    assert made_for.sha256 == release.sha256((index / made_for.file).read_bytes())
    assert not work.exists()


@pytest.mark.usefixtures("releases")
def test_an_older_release_is_reached_too_and_a_moved_file_is_found(world, index, rebase):
    publish(index, "1.1.0", engine=NEWS + OLD[ENGINE], model="", shapes=OLD[MODEL])
    assert rebase("--to", "1.1.0").exit_code == 0
    found = results(world, "1.1.0", engine=NEWS + OLD[ENGINE], shapes=OLD[MODEL])
    assert found == {ENGINE: NEWS + REPORTED, "demo/core/shapes.py": BIGGER}


CHANGED = OLD[ENGINE].replace("    job.run()\n", "    job.run(fast=True)\n")


@pytest.mark.usefixtures("releases")
def test_a_conflict_is_reported_with_its_hook_and_can_be_continued(world, index, rebase, work):
    publish(index, "1.3.0", engine=CHANGED)
    before = files(world.root)
    result = rebase("--to", "1.3.0")
    assert result.exit_code == 1
    assert f"read {work}/conflict.md, solve it in {work}/tree, then run" in result.stderr
    assert files(world.root) == before
    facts = json.loads((work / "conflict.json").read_text())
    assert (facts["patch"], facts["hooks"]) == ("engine-report.patch", ["on_begin"])
    (conflict,) = facts["conflicts"]
    assert conflict["path"] == ENGINE
    assert conflict["hooks"] == ["on_begin"]
    assert conflict["function"] == "begin"
    assert conflict["defined_at"] == [f"{ENGINE}:9"]
    assert conflict["sides"] == {
        "line": 11,
        "release": ["    job.run(fast=True)"],
        "base": ["    job.run()"],
        "patch": ["    trace_hooks.on_begin(job)", "    job.run()"],
    }
    report = (work / "conflict.md").read_text()
    assert "Hook here: on_begin. In the old release: `begin`." in report
    assert "+    trace_hooks.on_begin(job)" in report

    result = rebase("--continue")
    assert "engine.py still has conflict markers" in result.stderr
    solved = REPORTED.replace("job.run()", "job.run(fast=True)")
    (work / "tree" / ENGINE).write_text(solved)
    result = rebase("--continue")
    assert result.exit_code == 0, result.output
    assert outcomes(result)["engine-report.patch"] == "solved by hand"
    assert results(world, "1.3.0", engine=CHANGED) == {ENGINE: solved, MODEL: BIGGER}
    assert not work.exists()


@pytest.mark.usefixtures("releases")
def test_a_file_that_is_gone_must_be_removed_and_its_hook_moved(world, index, rebase, work):
    moved = OLD[MODEL] + "\n\ndef begin(job):\n    job.go()\n"
    publish(index, "1.3.0", engine="", model=moved)
    rebase("--to", "1.3.0")
    report = (work / "conflict.md").read_text()
    assert "The new release has no such file" in report
    assert f"- `{MODEL}:8`" in report
    assert f"1.3.0 has no {ENGINE}" in rebase("--continue").stderr
    subprocess.run(["git", "-C", work / "tree", "rm", ENGINE], check=True, capture_output=True)
    hooked = moved.replace("    job.go()", "    trace_hooks.on_begin(job)\n    job.go()")
    (work / "tree" / MODEL).write_text(hooked)
    assert rebase("--continue").exit_code == 0
    found = results(world, "1.3.0", model=moved)
    assert found == {MODEL: hooked.replace("SIZE = 1", "SIZE = 2")}


@pytest.mark.usefixtures("releases")
def test_a_patch_that_the_release_has_itself_is_dropped(world, index, rebase):
    publish(index, "1.3.0", model=BIGGER)
    result = rebase("--to", "1.3.0")
    assert outcomes(result)["model-grow.patch"] == "dropped"
    assert results(world, "1.3.0", model=BIGGER) == {ENGINE: REPORTED}


@pytest.mark.usefixtures("releases")
def test_a_hook_that_a_person_drops_is_named(index, rebase, work):
    publish(index, "1.3.0", engine=CHANGED)
    rebase("--to", "1.3.0")
    (work / "tree" / ENGINE).write_text(CHANGED)
    result = rebase("--continue")
    assert result.exit_code == 0
    assert "warning: 1.3.0 no longer calls on_begin" in result.stderr


@pytest.mark.usefixtures("releases")
@pytest.mark.parametrize(("engine", "exit_code"), [(NEWS + OLD[ENGINE], 0), (CHANGED, 1)])
def test_a_dry_run_tells_the_same_and_writes_nothing(
    world, index, rebase, tmp_path, engine, exit_code
):
    publish(index, "1.3.0", engine=engine)
    before = files(tmp_path)
    result = rebase("--to", "1.3.0", "--dry-run")
    assert result.exit_code == exit_code
    assert files(tmp_path) == before
    assert outcomes(result) == {
        "engine-report.patch": ["other line numbers", "conflict"][exit_code],
        "model-grow.patch": "same text",
    }
    assert exit_code == 0 or "## demo/core/engine.py, line 11" in result.stdout


@pytest.mark.usefixtures("releases")
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_all_newer_walks_up_to_the_release_where_the_series_breaks(world, index, rebase, options):
    publish(index, "1.1.0")
    publish(index, "1.3.0", engine=NEWS + OLD[ENGINE])
    publish(index, "1.4.0", engine=NEWS + CHANGED)
    publish(index, "1.5.0")
    result = rebase("--all-newer", *options)
    assert result.exit_code == 1
    assert "1.4.0" in result.stderr
    assert "from 1.3.0 to 1.4.0" in result.stdout
    written = ["1.2.0", "1.3.0"] if not options else ["1.2.0"]
    assert load_targets(world.root)["demo"].versions() == written


@pytest.mark.usefixtures("releases")
def test_all_newer_from_an_older_series_fills_the_gap_alone(world, index, rebase):
    for version in ("1.3.0", "1.4.0", "1.5.0"):
        publish(index, version, engine=NEWS + OLD[ENGINE])
    assert rebase("--to", "1.4.0").exit_code == 0
    assert rebase("--all-newer", "--from", "1.2.0").exit_code == 0
    every = ["1.2.0", "1.3.0", "1.4.0", "1.5.0"]
    assert load_targets(world.root)["demo"].versions() == every
    assert "has a series for every release after" in rebase("--all-newer").stderr


@pytest.mark.usefixtures("releases")
def test_a_rebase_under_way_is_not_run_over_and_can_be_aborted(world, index, rebase, work):
    publish(index, "1.3.0", engine=CHANGED)
    before = files(world.root)
    rebase("--to", "1.3.0")
    assert "is in use: run" in rebase("--to", "1.3.0").stderr
    assert rebase("--abort").exit_code == 0
    assert not work.exists()
    assert "no rebase of demo under way" in rebase("--continue").stderr
    assert files(world.root) == before


@pytest.mark.usefixtures("releases")
@pytest.mark.parametrize("left", ["a pick that was not written down", "an edit"])
def test_a_killed_run_is_taken_up_where_it_was(world, index, rebase, work, left):
    publish(index, "1.3.0", engine=NEWS + OLD[ENGINE])
    Rebase.start(world.target, "1.2.0", "1.3.0", work)
    if left == "an edit":
        (work / "tree" / ENGINE).write_text("half a file")
    else:
        git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-C", str(work / "tree")]
        subprocess.run([*git, "cherry-pick", "old~1"], check=True, capture_output=True)
    result = rebase("--continue")
    assert result.exit_code == 0, result.output
    assert outcomes(result)["engine-report.patch"] == "other line numbers"
    expected = {ENGINE: NEWS + REPORTED, MODEL: BIGGER}
    assert results(world, "1.3.0", engine=NEWS + OLD[ENGINE]) == expected


@pytest.mark.usefixtures("releases")
def test_a_patch_that_was_skipped_in_the_tree_counts_as_dropped(world, index, rebase, work):
    publish(index, "1.3.0", engine=CHANGED)
    rebase("--to", "1.3.0")
    skip = ["git", "-C", str(work / "tree"), "cherry-pick", "--skip"]
    subprocess.run(skip, check=True, capture_output=True)
    result = rebase("--continue")
    assert outcomes(result)["engine-report.patch"] == "dropped"
    assert results(world, "1.3.0") == {MODEL: BIGGER}


@pytest.mark.usefixtures("releases")
def test_a_solution_that_is_no_python_is_refused_and_can_be_mended(world, index, rebase, work):
    publish(index, "1.3.0", engine=CHANGED)
    rebase("--to", "1.3.0")
    (work / "tree" / ENGINE).write_text("def begin(:\n")
    result = rebase("--continue")
    assert "engine.py is no valid Python after the series, line 1" in result.stderr
    assert load_targets(world.root)["demo"].versions() == ["1.2.0"]
    solved = REPORTED.replace("job.run()", "job.run(fast=True)")
    (work / "tree" / ENGINE).write_text(solved)
    me = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    git = ["git", "-C", str(work / "tree"), *me]
    subprocess.run([*git, "commit", "--all", "--fixup=HEAD~1"], check=True, capture_output=True)
    todo = {"GIT_SEQUENCE_EDITOR": "true", "PATH": "/usr/bin:/bin"}
    squash = [*git, "rebase", "--interactive", "--autosquash", "base"]
    subprocess.run(squash, check=True, capture_output=True, env=todo)
    assert rebase("--continue").exit_code == 0
    assert results(world, "1.3.0", engine=CHANGED)[ENGINE] == solved


@pytest.mark.usefixtures("releases")
def test_what_makes_no_sense_is_refused_in_one_sentence(rebase, monkeypatch):
    for arguments in ((), ("--to", "1.3.0", "--all-newer"), ("--continue", "--abort")):
        assert "give one of --to VERSION" in rebase(*arguments).stderr
    assert "1.2.0 has a series already" in rebase("--to", "1.2.0").stderr
    assert (
        "9.9 has no series; there is one for: 1.2.0"
        in rebase("--from", "9.9", "--to", "1.3.0").stderr
    )
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "rebase needs git: install it" in rebase("--to", "1.3.0").stderr


def test_the_nearest_series_is_the_one_to_start_from(world):
    (world.root / "demo" / "1.6.0").mkdir()
    (world.root / "demo" / "1.6.0" / "series").touch()
    nearest = {"1.3.0": "1.2.0", "1.4.0": "1.2.0", "1.5.0": "1.6.0", "1.6.1": "1.6.0", "2": "1.6.0"}
    assert {v: nearest_version(world.target, v) for v in nearest} == nearest
    with pytest.raises(PatchError, match="has a series already"):
        nearest_version(world.target, "1.6.0")
