import io
import shutil
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from patches.config import Release
from patches.errors import PatchError, UnreachableError
from patches.format.hashes import sha256
from patches.maintain import release

FILES = {
    "demo/core/engine.py": b"1\n",
    "demo/core/deep/er.py": b"2\n",
    "demo/core/kernels.so": b"\x7fELF",
    "demo/corelike/other.py": b"3\n",
    "demo/core/../../escape.py": b"4\n",
    "../demo/core/escape.py": b"5\n",
}
WANTED = {"demo/core/engine.py": b"1\n", "demo/core/deep/er.py": b"2\n"}


def wheel(directory: Path, version: str = "1.2.0") -> Path:
    info = f"demo-{version}.dist-info"
    facts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: demo\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"demo-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (FILES | facts).items():
            archive.writestr(name, content)
    return path


def test_python_files_of_the_package_are_read_from_a_wheel(tmp_path):
    assert dict(release.python_files(wheel(tmp_path), "demo/core")) == WANTED


@pytest.mark.parametrize("layout", ["", "python/"])
def test_python_files_of_the_package_are_read_from_sources(tmp_path, layout):
    path = tmp_path / "demo-1.2.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"demo-1.2.0/{layout}{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo(f"demo-1.2.0/{layout}demo/core/link.py")
        link.type, link.linkname = tarfile.DIRTYPE, ""
        archive.addfile(link)
    assert dict(release.python_files(path, "demo/core")) == WANTED


def test_a_file_without_the_package_is_refused(tmp_path):
    with pytest.raises(PatchError, match="has no other/: it is not a release"):
        list(release.python_files(wheel(tmp_path), "other"))


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Path:
    """The real pip, which sees one directory and no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


def test_pip_gets_a_release_and_knows_which_there_are(world, offline, tmp_path):
    for version in ("1.10.0", "1.9.0"):
        wheel(offline, version)
    assert release.published_versions(world.target) == ["1.9.0", "1.10.0"]
    file = release.download(world.target, "1.9.0", tmp_path / "down")
    assert file == tmp_path / "down" / "demo-1.9.0-py3-none-any.whl"
    assert file.read_bytes() == (offline / file.name).read_bytes()


def test_a_release_that_pip_does_not_find_is_said_in_its_words(world, offline, tmp_path):
    wheel(offline)
    with pytest.raises(PatchError, match=r"^pip says: .*No matching distribution"):
        release.download(world.target, "9.9", tmp_path / "down")


def test_an_index_that_cannot_be_reached_is_told_from_one_that_lacks_the_release(
    world, offline, tmp_path, monkeypatch
):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(UnreachableError, match=r"cannot reach its package index: .*PIP_INDEX_URL"):
        release.download(world.target, "1.2.0", tmp_path / "down")


def test_a_file_that_is_not_the_one_of_the_configuration_is_refused(world, offline, tmp_path):
    file = wheel(offline)
    forged = replace(world.target, releases={"1.2.0": Release(file.name, "0" * 64)})
    for recorded in (False, True):
        with pytest.raises(PatchError, match="is not the file with the hash"):
            release.download(forged, "1.2.0", tmp_path / f"{recorded}", recorded=recorded)


def test_the_recorded_file_is_chosen_whatever_interpreter_this_is(world, offline, tmp_path):
    made = wheel(offline)
    for tags in (
        "cp27-cp27mu-manylinux1_x86_64",
        "cp39-abi3-manylinux_2_34_aarch64.musllinux_1_1_x",
    ):
        file = made.with_name(f"demo-1.2.0-{tags}.whl")
        shutil.copy(made, file)
        foreign = replace(
            world.target, releases={"1.2.0": Release(file.name, sha256(file.read_bytes()))}
        )
        into = tmp_path / tags
        assert release.download(foreign, "1.2.0", into, recorded=True).name == file.name
        file.unlink()
    fits = release.download(foreign, "1.2.0", tmp_path / "fits")
    assert fits.name == made.name
