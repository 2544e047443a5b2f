"""kill -9 in the middle of apply and revert: the state has a name and is mended byte for byte."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from patches import verify_target
from patches.apply import edit
from patches.apply.report import report
from patches.apply.state import State
from patches.apply.tree import Checkout

MENDABLE = {State.PRISTINE, State.PATCHED, State.OUTDATED, State.INTERRUPTED}
MOST_EVENTS = 1000
FILE_EVENTS = ("open", "os.", "shutil.", "fcntl.")

LOOP = """
import sys
from pathlib import Path
from patches.apply import edit
from patches.config import select_target
target, site = select_target("demo", Path(sys.argv[1])), Path(sys.argv[2])
print("ready", flush=True)
while True:
    edit.apply(target, site)
    edit.revert(target, site)
"""


def killed_before_file_event(number: int, act: Callable[[], object]) -> bool:
    """Run ``act`` in a child that kills itself before its nth call into the file system."""
    child = os.fork()
    if child == 0:
        events = 0

        def count(event: str, _arguments: object) -> None:
            nonlocal events
            if event.startswith(FILE_EVENTS):
                events += 1
                if events == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def mend_and_compare(world, where: Path | Checkout, pristine, by_apply: bool) -> State:
    """Mend with one of the two commands, check the result, and return the state that was found."""
    found = report(world.target, where)
    assert found.state in MENDABLE, found
    if found.state is State.INTERRUPTED:
        assert "python -m patches revert demo" in found.remedy
    if by_apply:
        edit.apply(world.target, where)
        verify_target("demo", site=where, root=world.root)
        assert world.holds(world.patched)
    edit.revert(world.target, where)
    assert world.tree() == pristine
    return State(found.state)


@pytest.mark.parametrize("by_apply", [False, True], ids=["mend by revert", "mend by apply"])
@pytest.mark.parametrize("start", ["pristine", "other series", "patched"])
def test_a_kill_before_every_single_file_operation_is_mended(world, second_series, start, by_apply):
    pristine = world.tree()
    series = {p.stem: p.read_bytes() for p in sorted(world.series_dir.glob("*.patch"))}
    act = edit.revert if start == "patched" else edit.apply
    seen = set()
    for number in range(1, MOST_EVENTS):
        if start != "pristine":
            world.write_series(**(second_series if start == "other series" else series))
            edit.apply(world.target, world.site)
            world.write_series(**series)
        killed = killed_before_file_event(number, lambda: act(world.target, world.site))
        seen.add(mend_and_compare(world, world.site, pristine, by_apply))
        if not killed:
            break
    assert 30 < number < MOST_EVENTS - 1
    assert State.INTERRUPTED in seen


@pytest.mark.parametrize("by_apply", [False, True], ids=["mend by revert", "mend by apply"])
def test_a_kill_before_every_single_file_operation_in_a_source_tree_is_mended(world, by_apply):
    shutil.rmtree(next(world.site.glob("*.dist-info")))
    pristine, tree = world.tree(), Checkout(world.site)
    seen = set()
    for number in range(1, MOST_EVENTS):
        killed = killed_before_file_event(number, lambda: edit.apply(world.target, tree))
        seen.add(mend_and_compare(world, tree, pristine, by_apply))
        if not killed:
            break
    assert 30 < number < MOST_EVENTS - 1
    assert State.INTERRUPTED in seen


def test_a_kill_at_a_random_moment_is_mended(world):
    pristine = world.tree()
    moments = random.Random(20)
    # Without site-packages (-S) Python starts in half the time.
    command = [sys.executable, "-S", "-c", LOOP, str(world.root), str(world.site)]
    repository = Path(edit.__file__).parents[2]
    seen = []
    for run in range(50):
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=repository)
        assert victim.stdout is not None
        with victim.stdout as output:
            assert output.readline() == b"ready\n"
            time.sleep(moments.uniform(0, 0.05))
            victim.kill()
            assert victim.wait() == -signal.SIGKILL
        seen.append(mend_and_compare(world, world.site, pristine, by_apply=run % 2 == 0))
    assert State.INTERRUPTED in seen
