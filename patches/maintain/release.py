"""Published releases of an upstream: which there are, and their files, by way of pip."""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from patches.apply.tree import LAYOUTS
from patches.config import Target, version_key
from patches.errors import PatchError, UnreachableError
from patches.format.hashes import sha256

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def published_versions(target: Target) -> list[str]:
    """Every version that pip's package index has, oldest first; pre-releases are left out."""
    # As text, because pip's --json came only with 25.1 and a new environment may have an older pip.
    printed = _pip("index", "versions", target.distribution, "--ignore-requires-python")
    listed = re.search(r"^Available versions: (.+)$", printed, re.MULTILINE)
    if listed is None:
        raise PatchError("pip lists no versions in a form we know: try another release of pip.")
    return sorted(listed[1].split(", "), key=version_key)


def download(target: Target, version: str, into: Path, *, recorded: bool = False) -> Path:
    """Download one release, a wheel or else the sources, and return the file.

    It is the one that fits this interpreter, or, with ``recorded``, the very one that
    ``config.json`` names for a release that is there: for its text any will do. PatchError if pip
    cannot get it or if it has another hash than ``config.json`` says.
    """
    into.mkdir(parents=True, exist_ok=True)
    known = target.releases.get(version)
    wanted = f"{target.distribution}=={version}"
    options = ("--no-deps", "--ignore-requires-python", "--quiet", "--dest", str(into))
    only = _this_wheel(known.file) if known and recorded else ()
    _pip("download", *options, *only, wanted)
    (file,) = into.iterdir()
    checked = known if known and (recorded or known.file == file.name) else None
    if checked and checked.sha256 != sha256(file.read_bytes()):
        raise PatchError(
            f"{file.name} from the package index is not the file with the hash in config.json, "
            f"{checked.file}: find out which of the two is right."
        )
    return file


def _this_wheel(name: str) -> Iterator[str]:
    """Options that make pip choose the wheel ``name``, whatever interpreter and machine this is."""
    if not name.endswith(".whl"):
        return
    python, abi, platforms = name.removesuffix(".whl").split("-")[-3:]
    yield "--only-binary=:all:"
    version = re.fullmatch(r"(?:cp|py)(\d)(\d*)", python.partition(".")[0])
    if version is not None and abi != "none":
        yield from ("--implementation=cp", f"--python-version={version[1]}.{version[2]}")
    yield f"--abi={abi}"
    yield from (f"--platform={platform}" for platform in platforms.split("."))


def python_files(archive: Path, package: str) -> Iterator[tuple[str, bytes]]:
    """Yield path, relative to site-packages, and content of every ``.py`` file of ``package``.

    Other files cannot carry a hook and would only make a tree large.
    """
    read = _wheel if archive.suffix == ".whl" else _sources
    wanted = re.compile(rf"{re.escape(package)}/(?!(?:.*/)?\.\./).+\.py")
    found = False
    for path, content in read(archive, wanted):
        found = True
        yield path, content
    if not found:
        raise PatchError(f"{archive} has no {package}/: it is not a release of the target.")


def _wheel(archive: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if wanted.fullmatch(name):
                yield name, files.read(name)


def _sources(archive: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    """Members lie in a directory named after the release, the package as in a checkout."""
    with tarfile.open(archive) as files:
        for member in files:
            inner = member.name.partition("/")[2]
            for layout in LAYOUTS:
                path = inner if layout == "." else inner.removeprefix(f"{layout}/")
                if wanted.fullmatch(path) and (content := files.extractfile(member)):
                    yield path, content.read()
                    break


def _pip(*arguments: str) -> str:
    run = subprocess.run([*_PIP, *arguments], capture_output=True, text=True)
    if run.returncode and "connection broken by" in run.stderr:
        raise UnreachableError(
            "pip cannot reach its package index: check the network, or set PIP_INDEX_URL or "
            "PIP_FIND_LINKS to one that can be reached."
        )
    if run.returncode:
        words = (run.stderr.strip() or run.stdout.strip()).splitlines()
        raise PatchError(f"pip says: {words[-1] if words else 'nothing'}.")
    return run.stdout
