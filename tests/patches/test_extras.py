"""What README tells users to install is what the patches and the GPU path take."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sglang_trace.preflight.unsupported import GPU_RELEASE

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def _installed(extra: str, package: str, python: str) -> str:
    """The release of a package that an extra pins on a Python."""
    wanted = [Requirement(text) for text in EXTRAS[extra]]
    (pin,) = [
        each.specifier
        for each in wanted
        if each.name == package
        and (each.marker is None or each.marker.evaluate({"python_version": python}))
    ]
    return str(pin).removeprefix("==")


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize(
    ("extra", "package"),
    [("sglang", "sglang"), ("sglang-gpu", "sglang"), ("megatron", "megatron-core")],
)
def test_every_extra_installs_one_release_that_has_patches(
    extra: str, package: str, python: str
) -> None:
    release = _installed(extra, package, python)
    assert (ROOT / "patches" / package / release / "series").is_file()


def test_on_3_11_pip_is_not_asked_for_the_wheel_that_it_refuses() -> None:
    assert _installed("megatron", "megatron-core", "3.11") == "0.16.1"
    assert _installed("megatron", "megatron-core", "3.12") == "0.19.2"


def test_the_gpu_extra_installs_the_release_that_the_gpu_path_takes() -> None:
    assert {_installed("sglang-gpu", "sglang", each) for each in ("3.11", "3.12")} == {GPU_RELEASE}


def test_readme_names_extras_that_exist_and_both_pythons_are_supported() -> None:
    named = set(re.findall(r"pip install -e '\.\[([\w,-]+)\]'", (ROOT / "README.md").read_text()))
    assert {"sglang", "sglang-gpu", "megatron"} <= named <= set(EXTRAS)
    assert PROJECT["requires-python"] == ">=3.11,<3.13"
