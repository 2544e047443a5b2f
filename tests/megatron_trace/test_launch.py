"""The launcher and unpatched Megatron, in processes of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from launching import launch, run_python
from torch.distributed.run import get_args_parser

from bridge.errors import TraceError
from megatron_trace.launch import through_rank_module

pytestmark = pytest.mark.server

JOBS = Path(__file__).parent / "jobs"


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the released Megatron-core, as the patch tool restores it."""
    import megatron.core

    site = Path(megatron.core.__file__).parents[2]
    copy = tmp_path_factory.mktemp("site")
    (record,) = site.glob("megatron_core-*.dist-info")
    for name in ("megatron", record.name, ".sglang-trace-patches-megatron-core"):
        shutil.copytree(site / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    reverted = run_python("-m", "patches", "revert", "megatron-core", "--site", str(copy))
    assert reverted.returncode == 0, reverted.stderr
    return copy


def test_with_fp4_off_the_patched_megatron_computes_the_same_bits(unpatched: Path) -> None:
    ours = run_python(str(JOBS / "plain_step.py"))
    theirs = run_python(str(JOBS / "plain_step.py"), path=(unpatched,))
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    (our_path, our_digest), (their_path, their_digest) = (
        run.stdout.splitlines()[-1].rsplit(maxsplit=1) for run in (ours, theirs)
    )
    assert Path(their_path).is_relative_to(unpatched)
    assert not Path(our_path).is_relative_to(unpatched)
    assert our_digest == their_digest


def test_a_rank_that_imports_an_unpatched_megatron_refuses_to_run(
    unpatched: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    run = run_python("-m", "megatron_trace.rank", str(script), path=(unpatched,))
    assert run.returncode == 1
    assert "trained" not in run.stdout
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert "python -m patches apply megatron-core" in run.stderr.splitlines()[-1]


def test_a_script_runs_in_every_rank_with_its_arguments_and_may_fail_with_a_sentence(
    tmp_path: Path,
) -> None:
    (tmp_path / "beside.py").write_text("from bridge.errors import UnknownTrajectory\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, torch, beside\n"
        "assert __name__ == '__main__' and torch.cuda.current_device() is not None\n"
        "open(f'{sys.argv[1]}/rank{os.environ[\"RANK\"]}', 'w').write(' '.join(sys.argv))\n"
        "raise beside.UnknownTrajectory('No trajectory is named t: generate it first.')\n"
    )
    run = launch("--nproc-per-node", "2", str(script), str(tmp_path), "--lr", "1e-3")
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == f"{script} {tmp_path} --lr 1e-3"
    assert run.returncode == 1
    assert "error: No trajectory is named t: generate it first." in run.stderr.splitlines()
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("option", ["--no-python", "--run-path"])
def test_programs_that_cannot_be_checked_are_refused(option: str) -> None:
    options = get_args_parser().parse_args([option, "train"])
    with pytest.raises(TraceError, match="pass a Python script"):
        through_rank_module(options)


def test_torchruns_options_are_kept() -> None:
    options = get_args_parser().parse_args(
        ["--nproc-per-node", "4", "--nnodes", "2", "-m", "package.train", "--seed", "3"]
    )
    through_rank_module(options)
    assert (options.nproc_per_node, options.nnodes) == ("4", "2")
    assert options.module
    assert options.training_script == "megatron_trace.rank"
    assert options.training_script_args == ["--as-module", "package.train", "--seed", "3"]
