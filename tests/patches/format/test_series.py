import pytest

from patches.errors import PatchError
from patches.format.series import load_series


def test_patches_are_applied_in_the_order_of_the_series(world):
    series = load_series(world.target, "1.2.0")
    pristine = {path: world.released.get(path) for path in series.paths}
    assert series.results(pristine) == world.patched
    assert [patch.subject for patch in series.patches] == ["first", "second"]


def test_edited_lines_are_counted_by_group_and_hooks_collected(world):
    series = load_series(world.target, "1.2.0")
    assert series.edited_lines() == {"hooks": 2, "cpu": 3}
    assert series.hooks == ("first",)


def test_the_wrong_order_names_the_patch_that_does_not_apply(world):
    (world.series_dir / "series").write_text("second.patch\nfirst.patch\n")
    series = load_series(world.target, "1.2.0")
    with pytest.raises(PatchError, match=r"^second\.patch: the hunk at line"):
        series.results({path: world.released.get(path) for path in series.paths})


def test_the_digest_changes_with_any_byte_and_with_the_order(world):
    digests = {load_series(world.target, "1.2.0").digest}
    (world.series_dir / "series").write_text("second.patch\nfirst.patch\n")
    digests.add(load_series(world.target, "1.2.0").digest)
    first = world.series_dir / "first.patch"
    first.write_bytes(first.read_bytes().replace(b"a test", b"a Test"))
    digests.add(load_series(world.target, "1.2.0").digest)
    assert len(digests) == 3


def test_a_listed_patch_that_is_missing_is_named(world):
    (world.series_dir / "first.patch").unlink()
    with pytest.raises(PatchError, match=r"lists first\.patch, which is missing"):
        load_series(world.target, "1.2.0")


@pytest.mark.parametrize("order", ["", "# nothing\n", "first.patch\nfirst.patch\n"])
def test_an_order_that_is_empty_or_lists_a_patch_twice_is_refused(world, order):
    (world.series_dir / "series").write_text(order)
    with pytest.raises(PatchError, match="lists every patch once"):
        load_series(world.target, "1.2.0")


def test_a_patch_outside_the_package_is_refused(world, unified, patch_file):
    diff = unified("demo/corelike/a.py", b"1\n", b"2\n")
    world.write_series(stray=patch_file("stray", diff))
    with pytest.raises(PatchError, match=r"demo/corelike/a\.py is outside demo/core/"):
        load_series(world.target, "1.2.0")


def test_a_version_without_series_says_which_there_are(world):
    with pytest.raises(PatchError, match=r"demo 9\.9 has no series; there is one for: 1\.2\.0"):
        load_series(world.target, "9.9")


def test_versions_are_ordered_by_number(world):
    for version in ("1.10.0", "1.9.3"):
        (world.root / "demo" / version).mkdir()
        (world.root / "demo" / version / "series").touch()
    assert world.target.versions() == ["1.2.0", "1.9.3", "1.10.0"]
