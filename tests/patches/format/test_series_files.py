import pytest

from patches.config import version_key
from patches.errors import PatchError
from patches.format.series import load_series
from patches.format.series_files import series_files, write_series_files


@pytest.fixture
def texts(world):
    return {f"{p.stem}.patch": p.read_bytes() for p in sorted(world.series_dir.glob("*.patch"))}


def lines(world, version):
    return (world.root / "demo" / version / "series").read_text().splitlines()


def contents(world, version):
    return {n: file.read_bytes() for n, file in series_files(world.target, version).items()}


def test_a_text_that_another_version_has_is_kept_once(world, texts):
    changed = texts | {"second.patch": texts["second.patch"].replace(b"a test", b"another")}
    write_series_files(world.target, "1.3.0", changed)
    assert lines(world, "1.3.0") == ["../1.2.0/first.patch", "second.patch"]
    assert contents(world, "1.3.0") == changed
    assert not (world.root / "demo/1.3.0/first.patch").exists()
    assert [p.name for p in load_series(world.target, "1.3.0").patches] == list(changed)


def test_writing_a_series_again_changes_no_file(world, texts):
    write_series_files(world.target, "1.3.0", texts)
    write_series_files(world.target, "1.2.0", texts)
    before = {p: p.read_bytes() for p in world.root.rglob("*") if p.is_file()}
    for version in ("1.3.0", "1.2.0"):
        write_series_files(world.target, version, texts)
    assert {p: p.read_bytes() for p in world.root.rglob("*") if p.is_file()} == before
    assert lines(world, "1.2.0") == ["first.patch", "second.patch"]


@pytest.mark.parametrize("change", ["edit", "drop"])
def test_a_change_of_a_shared_text_leaves_the_other_versions_as_they_were(world, texts, change):
    for version in ("1.3.0", "1.4.0"):
        write_series_files(world.target, version, texts)
    digests = {v: load_series(world.target, v).digest for v in ("1.3.0", "1.4.0")}
    mine = dict(texts)
    if change == "edit":
        mine["first.patch"] = texts["first.patch"].replace(b"a test", b"another")
    else:
        del mine["first.patch"]
    write_series_files(world.target, "1.2.0", mine)
    assert contents(world, "1.2.0") == mine
    assert {v: load_series(world.target, v).digest for v in ("1.3.0", "1.4.0")} == digests
    assert lines(world, "1.3.0") == ["first.patch", "../1.2.0/second.patch"]
    assert lines(world, "1.4.0") == ["../1.3.0/first.patch", "../1.2.0/second.patch"]


@pytest.mark.parametrize("line", ["../../x.patch", "/x.patch", "a/b.patch", "x.diff", "../x.patch"])
def test_a_line_that_leaves_the_target_is_refused(world, line):
    (world.series_dir / "series").write_text(f"{line}\n")
    with pytest.raises(PatchError, match=r"write NAME\.patch or \.\./VERSION/NAME\.patch"):
        load_series(world.target, "1.2.0")


def test_one_name_from_two_places_is_refused(world, texts):
    write_series_files(world.target, "1.3.0", texts)
    (world.series_dir / "series").write_text("first.patch\n../1.3.0/first.patch\n")
    with pytest.raises(PatchError, match="lists every patch once"):
        load_series(world.target, "1.2.0")


def test_versions_are_ordered_by_their_numbers():
    assert sorted(["1.10", "1.9.post1", "1.9"], key=version_key) == ["1.9", "1.9.post1", "1.10"]
