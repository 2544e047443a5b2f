"""Tiny packages, installed the way pip leaves them, and tiny series for them; real releases."""

import base64
import difflib
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from patches.config import Target, load_targets
from patches.errors import UnreachableError
from patches.format.hashes import git_blob
from patches.maintain import release

DEMO = {
    "distribution": "demo",
    "package": "demo/core",
    "hooks": "hooks.py",
    "version_files": ["demo/core/version.py"],
    "releases": {},
}
RELEASED = {
    "demo/core/__init__.py": b"",
    "demo/core/engine.py": b"".join(b"line %d\n" % n for n in range(1, 31)),
    "demo/core/model.py": b"one\r\ntwo\nthree\x0c\nno newline at the end",
    "demo/core/other.py": b"nobody touches this\n",
    "demo/core/version.py": b'__version__ = "1.2.0"\n',
}
PATCHED = {
    "demo/core/engine.py": RELEASED["demo/core/engine.py"]
    .replace(b"line 2\n", b"line 2\ntrace_hooks.first()\n")
    .replace(b"line 28\n", b""),
    "demo/core/model.py": RELEASED["demo/core/model.py"].replace(b"two\n", b"2\n"),
    "demo/core/added/new.py": b"ADDED = 1\n",
}


MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 << 30


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """pytest's, in memory where there is room for it.

    The tool waits for the disk after every file. That matters when the power goes and cannot be
    seen here; a killed process leaves the same files behind on either.
    """
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES
    with TemporaryDirectory(dir=MEMORY if roomy else None) as directory:
        yield Path(directory).resolve()


@pytest.fixture(scope="session")
def released(tmp_path_factory) -> Callable[[Target, str], Path]:
    """Get the published file of a release from pip's index, once a session.

    All of them lie in one directory, which pip can use as its index.
    """
    directory = tmp_path_factory.mktemp("releases")
    files: dict[tuple[str, str], Path] = {}

    def get(target: Target, version: str) -> Path:
        if (target.name, version) not in files:
            with TemporaryDirectory(dir=directory) as fresh:
                try:
                    file = release.download(target, version, Path(fresh), recorded=True)
                except UnreachableError as error:
                    pytest.skip(str(error))
                files[target.name, version] = file.rename(directory / file.name)
        return files[target.name, version]

    return get


def make_wheel(directory: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    """Write a wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    facts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [
        f"{path},sha256={urlsafe_sha256(content)},{len(content)}\n"
        for path, content in (files | facts).items()
    ]
    facts[f"{info}/RECORD"] = f"{''.join(lines)}{info}/RECORD,,\n".encode()
    directory.mkdir(parents=True, exist_ok=True)
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in (files | facts).items():
            archive.writestr(path, content)
    return wheel


def read_wheel(wheel: Path, paths: Iterable[str]) -> dict[str, bytes]:
    """The content of those of the paths that the wheel has."""
    with zipfile.ZipFile(wheel) as archive:
        there = set(archive.namelist())
        return {path: archive.read(path) for path in paths if path in there}


def urlsafe_sha256(content: bytes) -> str:
    """As RECORD has it."""
    digest = hashlib.sha256(content).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _text_lines(content: bytes) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", content.decode("latin-1"))


def unified(path: str, before: bytes | None, after: bytes) -> bytes:
    """A git-style diff of one file, made with difflib on lines that end at line feeds only."""
    old, new = (_text_lines(content) for content in (before or b"", after))
    lines = [f"diff --git a/{path} b/{path}\n"]
    lines += ["new file mode 100644\n"] * (before is None)
    blobs = "..".join("0" * 40 if c is None else git_blob(c) for c in (before, after))
    lines += [f"index {blobs}" + (" 100644\n" if before is not None else "\n")]
    source = "/dev/null" if before is None else f"a/{path}"
    for line in difflib.unified_diff(old, new, source, f"b/{path}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines).encode("latin-1")


def patch_file(subject: str, *diffs: bytes, group: str = "hooks", hooks: str = "none") -> bytes:
    message = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@b.c>\n"
        f"Date: Thu, 1 Jan 2026 00:00:00 +0000\nSubject: [PATCH] {subject}\n\nWhy here.\n\n"
        "Reason: a test\nForwarded: not-needed\nRemove-when: the test is gone\n"
        f"Group: {group}\nHooks: {hooks}\n---\n"
    )
    return message.encode() + b"".join(diffs)


@dataclass
class World:
    """A site-packages directory with ``demo`` and a patch root with a series for it."""

    site: Path
    root: Path
    version: str = "1.2.0"
    released: dict[str, bytes] = field(default_factory=lambda: dict(RELEASED))
    patched: dict[str, bytes] = field(default_factory=lambda: dict(PATCHED))

    @property
    def target(self) -> Target:
        return load_targets(self.root)["demo"]

    @property
    def series_dir(self) -> Path:
        return self.root / "demo" / "1.2.0"

    def install(self) -> None:
        info = self.site / f"demo-{self.version}.dist-info"
        info.mkdir(parents=True)
        record = []
        for path, content in self.released.items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_bytes(content)
            record.append(f"{path},sha256={urlsafe_sha256(content)},{len(content)}\n")
        (info / "METADATA").write_text(f"Name: demo\nVersion: {self.version}\n")
        (info / "RECORD").write_text("".join(record) + f"{info.name}/RECORD,,\n")

    def write_series(self, **patches: bytes) -> None:
        self.series_dir.mkdir(parents=True, exist_ok=True)
        for name, content in patches.items():
            (self.series_dir / f"{name}.patch").write_bytes(content)
        order = "".join(f"{name}.patch  # comment\n" for name in patches)
        (self.series_dir / "series").write_text(f"# order\n\n{order}")

    def tree(self) -> dict[str, tuple[bytes, int]]:
        """Content and mode of every file below the site; directories have no content."""
        found = {}
        for path in sorted(self.site.rglob("*")):
            content = path.read_bytes() if path.is_file() else b"<directory>"
            found[str(path.relative_to(self.site))] = (content, path.stat().st_mode)
        return found

    def holds(self, contents: dict[str, bytes]) -> bool:
        return all((self.site / path).read_bytes() == c for path, c in contents.items())


def demo_series() -> dict[str, bytes]:
    """Two patches; the second edits a file that the first has edited before."""
    engine = "demo/core/engine.py"
    half = RELEASED[engine].replace(b"line 2\n", b"line 2\ntrace_hooks.first()\n")
    return {
        "first": patch_file(
            "first",
            unified(engine, RELEASED[engine], half),
            unified("demo/core/added/new.py", None, PATCHED["demo/core/added/new.py"]),
            hooks="first",
        ),
        "second": patch_file(
            "second",
            unified(engine, half, PATCHED[engine]),
            unified(
                "demo/core/model.py", RELEASED["demo/core/model.py"], PATCHED["demo/core/model.py"]
            ),
            group="cpu",
        ),
    }


def make_world(directory: Path) -> World:
    world = World(directory / "site", directory / "patches")
    world.root.mkdir(parents=True)
    (world.root / "config.json").write_text(json.dumps({"demo": DEMO}))
    world.install()
    (world.site / "demo/core/engine.py").chmod(0o640)
    world.write_series(**demo_series())
    return world


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


@pytest.fixture(scope="session", name="unified")
def unified_fixture() -> Callable[[str, bytes | None, bytes], bytes]:
    return unified


@pytest.fixture(scope="session", name="patch_file")
def patch_file_fixture() -> Callable[..., bytes]:
    return patch_file


@pytest.fixture(scope="session", name="make_wheel")
def make_wheel_fixture() -> Callable[[Path, str, str, dict[str, bytes]], Path]:
    return make_wheel


@pytest.fixture(scope="session", name="read_wheel")
def read_wheel_fixture() -> Callable[[Path, Iterable[str]], dict[str, bytes]]:
    return read_wheel


@pytest.fixture(scope="session", name="make_world")
def make_world_fixture() -> Callable[[Path], World]:
    return make_world


@pytest.fixture
def second_series() -> dict[str, bytes]:
    """Another series for the same release: the first patch alone."""
    return {"first": demo_series()["first"]}


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """File permissions count, also when the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)
