import json
import subprocess
import sys
from functools import partial

import pytest
from typer.testing import CliRunner, Result

from patches import cli
from patches.config import ROOT, load_targets, select_target


@pytest.fixture
def run(world, monkeypatch):
    monkeypatch.setattr(cli, "load_targets", partial(load_targets, world.root))
    monkeypatch.setattr(cli, "select_target", partial(select_target, root=world.root))

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(cli.app, [*arguments, "--site", str(world.site)])

    return invoke


@pytest.fixture
def absent_target(world):
    """A second target in the configuration that is not installed."""
    config = json.loads((world.root / "config.json").read_text())
    config["ghost"] = config["demo"] | {"distribution": "ghost", "package": "ghost"}
    (world.root / "config.json").write_text(json.dumps(config))
    (world.root / "ghost" / "2.0").mkdir(parents=True)
    (world.root / "ghost" / "2.0" / "series").touch()


def test_the_commands_say_what_they_did_and_where_and_exit_with_0(run, world):
    steps = [
        ("apply", "demo patched"),
        ("apply", "demo is patched already"),
        ("verify", "demo 1.2.0 is patched (2 patches)"),
        ("revert", "demo reverted"),
        ("revert", "demo has nothing to revert"),
    ]
    for command, sentence in steps:
        result = run(command)
        assert (result.exit_code, result.stdout) == (0, f"{sentence} in {world.site}\n")


def test_verify_exits_with_1_and_one_sentence_when_unpatched(run):
    result = run("verify", "demo")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: demo 1.2.0 is not patched: run `python -m patches apply demo`.\n"
    )


def test_an_unknown_target_is_refused_with_the_known_ones(run):
    result = run("apply", "vllm")
    assert result.exit_code == 1
    assert result.stderr == "error: there is no target 'vllm'; choose one of: demo.\n"


def test_a_refused_apply_exits_with_1(run, world):
    (world.site / "demo/core/engine.py").write_bytes(b"mine\n")
    result = run("apply")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "engine.py was edited by someone else" in result.stderr


@pytest.mark.usefixtures("absent_target")
def test_a_target_that_is_absent_matters_only_when_named(run):
    assert run("apply").exit_code == 0
    assert run("verify").exit_code == 0
    for command in ("apply", "revert", "verify"):
        result = run(command, "ghost")
        assert result.exit_code == 1
        assert "ghost is not installed" in result.stderr


def test_nothing_installed_at_all_is_a_failure(run, world):
    for file in world.site.glob("*.dist-info/*"):
        file.unlink()
    next(world.site.glob("*.dist-info")).rmdir()
    for command in ("apply", "revert", "verify"):
        assert run(command).exit_code == 1


def test_status_as_json_has_every_fact(run, world):
    (found,) = json.loads(run("status", "--json").stdout)
    assert found == {
        "target": "demo",
        "state": "pristine",
        "remedy": "demo 1.2.0 is not patched: run `python -m patches apply demo`.",
        "installed": "1.2.0",
        "site": str(world.site),
        "series": "1.2.0",
        "patches": 2,
        "edited_lines": {"hooks": 2, "cpu": 3},
        "hooks": ["first"],
        "faults": {},
    }


def test_status_as_a_table_shows_state_lines_and_the_file_at_fault(run, world):
    (world.site / "demo/core/model.py").unlink()
    result = run("status")
    assert result.exit_code == 0
    for text in ("demo", "1.2.0", "foreign edits", "2 hooks, 3 cpu"):
        assert text in result.stdout
    assert "demo: demo/core/model.py is missing" in result.stdout


def test_status_survives_a_corrupt_patch_and_says_which(run, world):
    (world.series_dir / "first.patch").write_bytes(b"not a patch")
    (found,) = json.loads(run("status", "--json").stdout)
    assert found["state"] == "unreadable"
    assert found["remedy"].startswith("first.patch: ")


def test_verify_as_json_reports_and_fails_alike(run):
    result = run("verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["state"] == "pristine"


def test_checking_imports_neither_the_upstreams_nor_the_command_line():
    program = (
        "import sys, patches\n"
        "for name in ('sglang', 'megatron-core'):\n"
        "    try: patches.verify_target(name)\n"
        "    except patches.PatchError: pass\n"
        "print({'sglang', 'megatron', 'torch', 'typer', 'rich'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


def test_a_source_tree_is_patched_by_path(run, world):
    tree = str(world.site)
    arguments = [(c, "demo", "--tree", tree) for c in ("apply", "verify", "status", "revert")]
    for command in arguments:
        assert CliRunner().invoke(cli.app, command).exit_code == 0, command
    assert "give --site, or --tree" in run("apply", "--tree", tree).stderr
    assert "give --site, or --tree" in run("apply", "--version", "1.2.0").stderr
