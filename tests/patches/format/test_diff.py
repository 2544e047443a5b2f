import pytest
from hypothesis import given
from hypothesis import strategies as st

from patches.errors import PatchError
from patches.format.diff import parse_diff, split_lines

PATH = "demo/core/file.py"
BEFORE = b"".join(b"%d\n" % n for n in range(1, 21))
AFTER = BEFORE.replace(b"10\n", b"ten\n")

# Lines that repeat, are empty, or hold a carriage return are the ones that a lax engine confuses.
LINES = st.lists(
    st.sampled_from([b"a", b"b", b"", b"a\r", b"\x0c", b"@@ -1 +1 @@", b"--- x", b"\xff"])
)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    text = b"".join(line + b"\n" for line in draw(LINES))
    return text.removesuffix(b"\n") if draw(st.booleans()) else text


@given(before=contents(), after=contents())
def test_applying_a_diff_gives_the_other_file_in_both_directions(unified, before, after):
    if before == after:
        return
    (forward,) = parse_diff(unified(PATH, before, after))
    (backward,) = parse_diff(unified(PATH, after, before))
    assert forward.apply(before) == after
    assert backward.apply(after) == before


@given(before=contents(), after=contents(), other=contents())
def test_a_diff_never_applies_where_its_lines_are_not(unified, before, after, other):
    if before == after:
        return
    (diff,) = parse_diff(unified(PATH, before, after))
    hunks_fit = all(
        tuple(split_lines(other)[h.start : h.start + len(h.old)]) == h.old for h in diff.hunks
    )
    if hunks_fit:
        diff.apply(other)
    else:
        with pytest.raises(PatchError, match="does not match"):
            diff.apply(other)


@given(after=contents().filter(bool))
def test_a_new_file_is_made_from_nothing_only(unified, after):
    (diff,) = parse_diff(unified(PATH, None, after))
    assert diff.creates
    assert diff.apply(None) == after
    with pytest.raises(PatchError, match="exists already"):
        diff.apply(b"")


def test_an_edit_of_a_missing_file_is_refused(unified):
    (diff,) = parse_diff(unified(PATH, BEFORE, AFTER))
    with pytest.raises(PatchError, match="does not exist"):
        diff.apply(None)


def test_lines_that_moved_by_one_are_refused(unified):
    (diff,) = parse_diff(unified(PATH, BEFORE, AFTER))
    with pytest.raises(PatchError, match=r"line 7 of demo/core/file\.py does not match"):
        diff.apply(b"0\n" + BEFORE)


def test_white_space_counts(unified):
    (diff,) = parse_diff(unified(PATH, BEFORE, AFTER))
    with pytest.raises(PatchError, match="does not match"):
        diff.apply(BEFORE.replace(b"9\n", b"9 \n"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"@@ -7,7 +7,7 @@", b"@@ -7,8 +7,8 @@"),
        (b"@@ -7,7 +7,7 @@", b"@@ -7,6 +7,6 @@"),
        (b"@@ -7,7 +7,7 @@", b"@@ -7,7 @@"),
        (b"+ten\n", b"*ten\n"),
        (b"+ten\n", b""),
        (b" 13\n", b" 13\n-- \n2.39.5\n"),
        (b"+++ b/demo", b"+++ b/other"),
        (b"--- a/demo", b"--- a/other"),
        (b"index ", b"old mode 100644\nnew mode 100755\nindex "),
        (b" b/demo/core/file.py\nindex", b" b/demo/core/renamed.py\nindex"),
        (b"demo/core", b"demo/../core"),
        (b"demo/core", b"/etc"),
    ],
)
def test_anything_but_a_plain_diff_is_refused(unified, old, new):
    text = unified(PATH, BEFORE, AFTER)
    assert old in text
    with pytest.raises(PatchError):
        parse_diff(text.replace(old, new))


def test_a_wrong_position_after_the_patch_is_refused(unified):
    text = unified(PATH, BEFORE, AFTER).replace(b"+7,7", b"+8,7")
    (diff,) = parse_diff(text)
    with pytest.raises(PatchError, match="does not match"):
        diff.apply(BEFORE)


def test_deletions_are_refused():
    text = (
        f"diff --git a/{PATH} b/{PATH}\ndeleted file mode 100644\nindex 1..0\n"
        f"--- a/{PATH}\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    )
    with pytest.raises(PatchError, match="deleted file mode"):
        parse_diff(text.encode())


def test_one_file_twice_in_one_patch_is_refused(unified):
    with pytest.raises(PatchError, match="at most one diff a file"):
        parse_diff(unified(PATH, BEFORE, AFTER) * 2)


def test_an_empty_diff_is_refused():
    with pytest.raises(PatchError, match="at least one file"):
        parse_diff(b"")
