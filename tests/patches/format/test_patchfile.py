import pytest

from patches.errors import PatchError
from patches.format.patchfile import parse_patch


@pytest.fixture
def content(unified, patch_file):
    diff = unified("demo/core/a.py", b"1\n2\n", b"1\nhooks.go()\nhooks.stop()\n")
    return patch_file("engine: go", diff, hooks="go, stop")


def test_subject_trailers_hooks_and_edited_lines_are_read(content):
    patch = parse_patch("engine-go.patch", content)
    assert patch.subject == "engine: go"
    assert patch.trailers["Reason"] == "a test"
    assert (patch.group, patch.hooks) == ("hooks", ("go", "stop"))
    assert patch.edited_lines == 3


def test_folded_subjects_and_trailers_are_joined(content):
    content = content.replace(b"engine: go", b"engine:\n go").replace(b"a test", b"a\n test")
    patch = parse_patch("engine-go.patch", content)
    assert (patch.subject, patch.trailers["Reason"]) == ("engine: go", "a test")


def test_the_separator_before_the_diff_is_optional(content):
    without = parse_patch("p", content.replace(b"---\ndiff", b"\ndiff"))
    assert without == parse_patch("p", content)


def test_a_patch_without_hooks_says_none(content):
    assert parse_patch("p", content.replace(b"Hooks: go, stop", b"Hooks: none")).hooks == ()


@pytest.mark.parametrize("name", ["Reason", "Forwarded", "Remove-when", "Group", "Hooks"])
def test_every_trailer_is_required(content, name):
    lines = [line for line in content.splitlines(True) if not line.startswith(name.encode())]
    with pytest.raises(PatchError, match=rf"p\.patch: .* lacks {name}"):
        parse_patch("p.patch", b"".join(lines))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b"Group: hooks", b"Group: gpu", "must be one of: hooks, cpu"),
        (b"Group: hooks", b"Group: hooks\nGroup: cpu", "not one of the trailers, once"),
        (b"Group: hooks", b"Group: hooks\nSeverity: high", "not one of the trailers, once"),
        (b"Reason: a test", b"Reason:", "lacks Reason"),
        (b"Why here", "Wähy".encode(), "must be ASCII"),
        (b"From 000", b"From 123", "--zero-commit"),
        (b"[PATCH]", b"[PATCH 1/2]", "no `Subject"),
        (b"diff --git", b"diff --got", "for at least one file"),
    ],
)
def test_a_malformed_patch_is_refused_by_name(content, old, new, sentence):
    with pytest.raises(PatchError, match=r"^p\.patch: ") as caught:
        parse_patch("p.patch", content.replace(old, new))
    assert sentence in str(caught.value)
