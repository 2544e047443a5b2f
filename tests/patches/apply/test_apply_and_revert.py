import errno
import fcntl
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patches import PatchError, verify_target
from patches.apply import edit
from patches.apply.state import State, inspect, require_upstream, series_for

ENGINE = "demo/core/engine.py"
NEW = "demo/core/added/new.py"
MOST_OPERATIONS = 100


def state_of(world):
    upstream = require_upstream(world.target, world.site)
    return inspect(world.target, upstream, series_for(world.target, upstream)).state


def apply(world):
    return edit.apply(world.target, world.site)


def revert(world):
    return edit.revert(world.target, world.site)


def verify(world):
    verify_target("demo", site=world.site, root=world.root)


def test_apply_patches_every_file_and_revert_restores_the_whole_tree(world):
    before = world.tree()
    assert apply(world)
    assert world.holds(world.patched)
    assert state_of(world) is State.PATCHED
    verify(world)
    assert revert(world)
    assert world.tree() == before
    assert state_of(world) is State.PRISTINE


def test_a_second_apply_and_a_second_revert_change_nothing(world):
    before = world.tree()
    assert not revert(world)
    assert world.tree() == before
    apply(world)
    patched = world.tree()
    assert not apply(world)
    assert world.tree() == patched
    revert(world)
    assert not revert(world)
    assert world.tree() == before


def test_the_mode_of_a_file_is_kept(world):
    apply(world)
    assert (world.site / ENGINE).stat().st_mode & 0o777 == 0o640


def test_a_hard_linked_copy_is_not_written_through(world, tmp_path):
    (tmp_path / "cache.py").hardlink_to(world.site / ENGINE)
    apply(world)
    assert (tmp_path / "cache.py").read_bytes() == world.released[ENGINE]


def test_python_never_runs_stale_byte_code(world, unified, patch_file):
    init = "demo/core/__init__.py"
    world.released = {init: b"VALUE = 1\n"}
    world.version = "1.2.0"
    for info in world.site.glob("*.dist-info/*"):
        info.unlink()
    next(world.site.glob("*.dist-info")).rmdir()
    world.install()
    diff = unified(init, world.released[init], b"VALUE = 2\n")
    world.write_series(only=patch_file("only", diff))
    seen = []
    for change in (apply, revert, apply, revert):
        change(world)
        program = "import demo.core; print(demo.core.VALUE)"
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=world.site, capture_output=True, check=True
        )
        seen.append(int(run.stdout))
    assert seen == [2, 1, 2, 1]


def test_byte_code_and_directory_of_an_added_file_go_with_it(world):
    before = world.tree()
    apply(world)
    cache = (world.site / NEW).parent / "__pycache__"
    cache.mkdir()
    (cache / "new.cpython-311.pyc").touch()
    revert(world)
    assert world.tree() == before


def test_an_unpatched_target_fails_verification_with_the_command(world):
    with pytest.raises(PatchError, match=r"is not patched: run `python -m patches apply demo`"):
        verify(world)


def test_another_version_is_refused_by_name_of_the_supported_ones(make_world, tmp_path):
    world = make_world(tmp_path / "a")
    next(world.site.glob("*.dist-info/METADATA")).write_text("Name: demo\nVersion: 1.3.0\n")
    next(world.site.glob("*.dist-info")).rename(world.site / "demo-1.3.0.dist-info")
    before = world.tree()
    sentence = r"demo 1\.3\.0 is installed in .* but there are patches only for 1\.2\.0: run `pip"
    for act in (apply, verify):
        with pytest.raises(PatchError, match=sentence):
            act(world)
    assert not revert(world)
    assert state_of(world) is State.UNSUPPORTED
    assert world.tree() == before


def test_a_target_that_is_not_installed_is_refused_with_the_pip_command(world, tmp_path):
    for act in (edit.apply, edit.revert):
        with pytest.raises(PatchError, match=r"is not installed in .*pip install demo==1\.2\.0"):
            act(world.target, tmp_path / "elsewhere")


def test_a_target_without_record_is_refused(world):
    next(world.site.glob("*.dist-info/RECORD")).unlink()
    with pytest.raises(PatchError, match="was not installed from a wheel"):
        apply(world)


def test_a_record_without_hashes_is_refused(world):
    record = next(world.site.glob("*.dist-info/RECORD"))
    record.write_text("".join(f"{path},,\n" for path in world.released))
    with pytest.raises(PatchError, match="has no sha256"):
        apply(world)


def spoil_edited(world):
    (world.site / ENGINE).write_bytes(b"mine\n")


def spoil_missing(world):
    (world.site / ENGINE).unlink()


def spoil_stranger(world):
    (world.site / NEW).parent.mkdir(exist_ok=True)
    (world.site / NEW).write_bytes(b"mine\n")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (spoil_edited, "was edited by someone else"),
        (spoil_missing, "is missing"),
        (spoil_stranger, "is not part of the release"),
    ],
)
@pytest.mark.parametrize("patched_before", [False, True])
def test_foreign_edits_are_named_and_never_overwritten(world, spoil, problem, patched_before):
    if patched_before:
        apply(world)
    spoil(world)
    before = world.tree()
    assert state_of(world) is State.FOREIGN
    for act in (apply, verify, *([revert] if patched_before else [])):
        with pytest.raises(PatchError, match=f"{problem}.*pip install --force-reinstall"):
            act(world)
    assert world.tree() == before


def test_a_reinstalled_package_is_pristine_and_can_be_patched_again(world):
    before = world.tree()
    apply(world)
    for path, content in world.released.items():
        (world.site / path).write_bytes(content)
    # pip leaves what it did not install: the file that the series added.
    assert state_of(world) is State.INTERRUPTED
    assert apply(world)
    verify(world)
    revert(world)
    assert {path: file[0] for path, file in world.tree().items()} == {
        path: file[0] for path, file in before.items()
    }


def test_what_an_upgrade_leaves_behind_is_reverted(world):
    apply(world)
    for path in world.released:
        (world.site / path).unlink()
    for file in world.site.glob("*.dist-info/*"):
        file.unlink()
    next(world.site.glob("*.dist-info")).rmdir()
    world.version = "1.3.0"
    world.released[ENGINE] = b"rewritten\n"
    world.install()
    assert revert(world)
    files = {path for path, (content, _) in world.tree().items() if content != b"<directory>"}
    assert files == {
        *world.released,
        *(f"demo-1.3.0.dist-info/{n}" for n in ("METADATA", "RECORD")),
    }
    assert world.holds(world.released)


def test_a_changed_series_fails_verification_and_apply_follows_it(world, second_series):
    before = world.tree()
    apply(world)
    full = world.tree()
    original = {p.stem: p.read_bytes() for p in sorted(world.series_dir.glob("*.patch"))}
    world.write_series(**second_series)
    assert state_of(world) is State.OUTDATED
    with pytest.raises(PatchError, match="patched with another series: run"):
        verify(world)
    assert apply(world)
    verify(world)
    model = "demo/core/model.py"
    assert (world.site / model).read_bytes() == world.released[model]
    world.write_series(**original)
    apply(world)
    assert {p: f[0] for p, f in world.tree().items() if "manifest" not in p} == {
        p: f[0] for p, f in full.items() if "manifest" not in p
    }
    revert(world)
    assert world.tree() == before


def test_revert_needs_no_series(world):
    before = world.tree()
    apply(world)
    (world.series_dir / "series").write_text("gone.patch\n")
    assert revert(world)
    assert world.tree() == before


@pytest.mark.parametrize("damage", [b" line 3\n", b"@@ -"])
def test_a_corrupt_patch_file_changes_nothing(world, damage):
    before = world.tree()
    first = world.series_dir / "first.patch"
    assert damage in first.read_bytes()
    first.write_bytes(first.read_bytes().replace(damage, b"*" + damage))
    with pytest.raises(PatchError, match=r"^first\.patch: line \d+ of the diff"):
        apply(world)
    assert world.tree() == before


def test_a_patch_that_does_not_apply_changes_nothing(world, unified, patch_file):
    before = world.tree()
    world.write_series(
        good=(world.series_dir / "first.patch").read_bytes(),
        bad=patch_file("bad", unified("demo/core/other.py", b"not there\n", b"x\n")),
    )
    with pytest.raises(PatchError, match=r"^bad\.patch: the hunk at line 1 of demo/core/other\.py"):
        apply(world)
    assert world.tree() == before


def test_a_damaged_journal_is_said_and_changes_nothing(world):
    apply(world)
    for saved in (world.site / ".sglang-trace-patches-demo").glob("[0-9a-f]*"):
        saved.write_bytes(b"damaged")
    before = world.tree()
    with pytest.raises(PatchError, match=r"is damaged: .*--force-reinstall"):
        revert(world)
    assert world.tree() == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"series": "", "files": {"a": {}}}']
)
def test_a_damaged_manifest_is_said_and_changes_nothing(world, content):
    apply(world)
    (world.site / ".sglang-trace-patches-demo/manifest.json").write_bytes(content)
    before = world.tree()
    for act in (apply, revert, verify):
        with pytest.raises(PatchError, match=r"manifest in .* is damaged: remove that directory"):
            act(world)
    assert world.tree() == before


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("patched_before", [False, True])
def test_an_error_at_any_replacement_leaves_nothing_half_done(
    world, second_series, monkeypatch, failure, patched_before
):
    pristine = world.tree()
    original = Path.replace
    if patched_before:
        series = {p.stem: p.read_bytes() for p in sorted(world.series_dir.glob("*.patch"))}
        world.write_series(**second_series)
        apply(world)
        world.write_series(**series)
    for fail_at in range(1, MOST_OPERATIONS):
        calls = 0

        def replace(self, target, fail_at=fail_at):
            nonlocal calls
            calls += 1
            if calls == fail_at:
                raise failure
            return original(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        try:
            apply(world)
        except (PatchError, KeyboardInterrupt):
            monkeypatch.setattr(Path, "replace", original)
            assert state_of(world) in {State.PRISTINE, State.OUTDATED, State.INTERRUPTED}
            if not patched_before:
                assert world.tree() == pristine
            continue
        break
    assert 5 < fail_at < MOST_OPERATIONS - 1
    monkeypatch.setattr(Path, "replace", original)
    verify(world)
    revert(world)
    assert world.tree() == pristine


def test_when_even_the_undo_fails_revert_mends_it_later(world, monkeypatch):
    before = world.tree()
    original = Path.replace
    calls = []

    def replace(self, target):
        calls.append(target)
        if len(calls) > 6:  # the journal is complete and one file is replaced
            raise OSError(errno.EIO, "Input/output error", str(target))
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(PatchError, match="Input/output error"):
        apply(world)
    monkeypatch.setattr(Path, "replace", original)
    assert state_of(world) is State.INTERRUPTED
    with pytest.raises(PatchError, match=r"was interrupted: run `python -m patches revert demo`"):
        verify(world)
    assert revert(world)
    assert world.tree() == before


def test_a_site_that_is_not_ours_is_refused_in_one_sentence(make_world, request):
    # Not below tmp_path, which other users may not enter.
    base = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(base))
    base.chmod(0o755)
    world = make_world(base)
    before = world.tree()
    for path in (world.site, *world.site.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    request.getfixturevalue("unprivileged")
    with pytest.raises(PatchError, match=r"cannot use .*: run the command as the owner"):
        apply(world)
    assert {p: f[0] for p, f in world.tree().items()} == {p: f[0] for p, f in before.items()}


def test_a_running_edit_keeps_the_next_one_waiting(world, monkeypatch):
    monkeypatch.setattr(edit, "LOCK_PATIENCE_S", 0.1)
    before = world.tree()
    with next(world.site.glob("*.dist-info/RECORD")).open("r+b") as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(PatchError, match="another `python -m patches` is at work on demo"):
            apply(world)
    assert world.tree() == before
    assert apply(world)


def test_of_two_applies_at_once_one_patches_and_the_other_finds_it_done(world):
    program = (
        "import sys; from pathlib import Path; from patches.apply import edit; "
        "from patches.config import select_target; "
        "print(edit.apply(select_target('demo', Path(sys.argv[1])), Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(world.root), str(world.site)]
    repository = Path(edit.__file__).parents[2]
    runs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository)
        for _ in range(2)
    ]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["False", "True"]
    verify(world)


LINES = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n"]), max_size=12).map(b"".join)


@settings(max_examples=60, deadline=None)
@given(released=LINES, patched=LINES.filter(bool))
def test_any_file_survives_apply_and_revert(
    make_world, unified, patch_file, tmp_path_factory, released, patched
):
    if released == patched:
        return
    world = make_world(tmp_path_factory.mktemp("any"))
    path = "demo/core/other.py"
    other = unified(path, world.released[path], released) if released else b""
    there = unified(path, released or world.released[path], patched)
    patches = [other, there] if released and released != world.released[path] else [there]
    world.write_series(**{f"p{n}": patch_file(f"p{n}", d) for n, d in enumerate(patches)})
    before = world.tree()
    apply(world)
    assert (world.site / path).read_bytes() == patched
    verify(world)
    revert(world)
    assert world.tree() == before
