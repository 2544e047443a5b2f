"""Kernels are compiled once, by whoever comes first, and a failure says what to do."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_trace.attention import build
from sglang_trace.attention.decode import _Arguments

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that hands plain C++ to the host compiler and notes every call."""
    host = shutil.which("c++") or shutil.which("g++")
    if host is None:
        pytest.skip("needs a C++ compiler")
    calls = tmp_path / "calls"
    calls.touch()
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo one; exit; fi\n'
        f'echo "$@" >> {calls}\n'
        "for word; do\n"
        'case "$word" in -D*) macro=$word;; *.cu) source=$word;; esac; out=$word\n'
        "done\n"
        f'exec {host} -x c++ -shared -fPIC "$macro" "$source" -o "$out"\n'
    )
    nvcc.chmod(0o755)
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "answer.cu").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return calls


def test_a_kernel_is_compiled_once_for_each_set_of_constants(compiler: Path) -> None:
    assert build.load("answer.cu", {"ANSWER": 1}).answer() == 1
    assert build.load("answer.cu", {"ANSWER": 2}).answer() == 2
    assert build.load("answer.cu", {"ANSWER": 1}).answer() == 1
    assert len(compiler.read_text().splitlines()) == 2


def test_a_changed_source_is_compiled_again(compiler: Path) -> None:
    build.load("answer.cu", {"ANSWER": 1})
    (build.SOURCES / "answer.cu").write_text(SOURCE.replace("return ", "return 10 + "))
    assert build.load("answer.cu", {"ANSWER": 1}).answer() == 11


def test_nothing_half_made_is_left_by_a_failure(compiler: Path, tmp_path: Path) -> None:
    (build.SOURCES / "answer.cu").write_text("no C++\n")
    with pytest.raises(build.KernelBuildError, match="nvcc cannot compile"):
        build.load("answer.cu", {"ANSWER": 1})
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.KernelBuildError, match="set XDG_CACHE_HOME"):
        build.load("answer.cu", {"ANSWER": 1})


def test_without_nvcc_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("this machine has the CUDA toolkit at its usual place")
    with pytest.raises(build.KernelBuildError, match="install the CUDA toolkit"):
        build.load("paged_decode.cu", {})


def test_the_kernel_itself_compiles_where_there_is_nvcc() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    assert subprocess.run(["nvcc", "--version"], capture_output=True).returncode == 0
    constants = {"HEAD_DIM": 128, "HEADS": 4, "GROUP": 8}
    constants |= {"SUB_TILES": 2, "STAGES": 3, "CTAS_PER_SM": 2}
    library = build.load("paged_decode.cu", constants)
    assert library.paged_decode
    # Python hands the kernel its arguments as one structure, which both sides write down.
    assert library.paged_decode_argument_bytes() == ctypes.sizeof(_Arguments)
