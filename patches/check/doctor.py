"""What `doctor` finds: files, versions, and the hooks and signatures of what Python imports."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from platform import python_version

from patches.apply.report import Report, report
from patches.apply.state import State, Where, require_upstream
from patches.check.sites import CallSite, hook_sites
from patches.config import Target

IMPORT_PATIENCE_S = 300


@dataclass(frozen=True)
class Liveness:
    """A hook, the function that must call it, and why it does not; empty if it does.

    ``left_out``: the upstream has no such function here, because something optional is missing.
    """

    path: str
    function: str
    hook: str
    problem: str
    left_out: bool = False

    @property
    def verdict(self) -> str:
        """The state in one word."""
        if self.problem:
            return "DEAD"
        return "absent" if self.left_out else "live"


@dataclass(frozen=True)
class Examination:
    """What importing a patched target shows.

    ``uses`` is the number of things that our code takes for granted in it (``contract.py``), and
    ``faults`` says which of them are different there.
    """

    hooks: tuple[Liveness, ...] = ()
    uses: int = 0
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """One target.

    ``supported`` are the versions that have a series and ``tested`` the Python and torch versions
    that the series for this release was tested with; ``hooks``, ``uses`` and ``faults`` are those
    of an ``Examination``, empty while it is not patched.
    """

    report: Report
    supported: tuple[str, ...]
    python: str
    torch: str | None
    tested: tuple[Mapping[str, str], ...]
    hooks: tuple[Liveness, ...]
    uses: int
    faults: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Fully patched, every hook is live, and everything that our code uses is there."""
        dead = any(each.problem for each in self.hooks)
        return self.report.state == State.PATCHED and not dead and not self.faults

    @property
    def combination_tested(self) -> bool:
        """Whether the series was tested with this Python and this torch."""
        return any(
            _is_version(self.python, each["python"]) and _is_version(self.torch, each["torch"])
            for each in self.tested
        )

    def as_dict(self) -> dict[str, object]:
        """Every fact, for JSON."""
        verdicts = {"healthy": self.healthy, "combination_tested": self.combination_tested}
        return asdict(self) | verdicts


def diagnose(target: Target, where: Where = None) -> Diagnosis:
    """Look at a target; where it is patched, import it in a process of its own."""
    found = report(target, where)
    release = target.releases.get(found.installed or "")
    patched = found.state == State.PATCHED
    examined = _examine(target, where) if patched else Examination()
    return Diagnosis(
        report=found,
        supported=tuple(target.versions()),
        python=python_version(),
        torch=_version_of("torch"),
        tested=() if release is None else release.tested,
        hooks=examined.hooks,
        uses=examined.uses,
        faults=examined.faults,
    )


def in_words(found: Diagnosis) -> Iterator[str]:
    """The diagnosis as lines of text."""
    about = found.report
    yield f"{about.target} {about.installed or ''}: {about.state}".replace(" :", ":")
    yield f"  series for: {', '.join(found.supported)}"
    if about.installed in found.supported:
        torch = f"torch {found.torch}" if found.torch else "no torch"
        verdict = "tested" if found.combination_tested else "not tested"
        yield f"  Python {found.python}, {torch}: {verdict} with this release"
    for hook in found.hooks:
        caller = f"{hook.path}: {hook.function or 'module level'}"
        yield f"  {hook.verdict}  {hook.hook}  {caller}"
        if hook.problem:
            yield f"        {hook.problem}"
    for fault in found.faults:
        yield f"  UNLIKE  {fault}"
    if found.uses and not found.faults:
        yield f"  as our code needs it: {found.uses} signatures and groups of attributes"
    if about.remedy:
        yield f"  {about.remedy}"
    elif any(each.problem for each in found.hooks):
        yield (
            "  the files are patched but not what Python imports: remove other copies from the "
            "path and plugins that replace these functions, or fix what fails to be imported."
        )


def _examine(target: Target, where: Where) -> Examination:
    upstream = require_upstream(target, where)
    calls = hook_sites(target, where)
    home = target.series_dir.parents[1]
    contract = Path(target.hooks).parent / "preflight" / "upstream_api.py"
    question = {
        "site": str(upstream.site),
        "version": upstream.version,
        "calls": [asdict(call) for call in calls],
        "home": str(home),
        "contract": ".".join(contract.with_suffix("").parts) if (home / contract).exists() else "",
    }
    path = [] if where is None else [str(upstream.site)]
    path += [entry for entry in [os.environ.get("PYTHONPATH")] if entry]
    try:
        run = subprocess.run(
            [sys.executable, "-m", "patches.check.examine"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=IMPORT_PATIENCE_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        answer = json.loads(run.stdout.splitlines()[-1])
        hooks = tuple(Liveness(**each) for each in answer["hooks"])
        return Examination(hooks, answer["uses"], tuple(answer["faults"]))
    except subprocess.TimeoutExpired:
        return _all_dead(calls, f"importing took more than {IMPORT_PATIENCE_S} s")
    except (ValueError, IndexError):
        words = run.stderr.strip().splitlines()
        return _all_dead(calls, f"importing failed: {words[-1] if words else run.returncode}")


def _all_dead(calls: list[CallSite], problem: str) -> Examination:
    dead = (Liveness(call.path, call.function, call.hook, problem) for call in calls)
    return Examination(hooks=tuple(dead))


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_version(found: str | None, wanted: str) -> bool:
    """Whether ``wanted`` is the beginning of a version: 3.11 of 3.11.7, 2.13.0 of 2.13.0+cpu."""
    return found is not None and f"{found.partition('+')[0]}.".startswith(f"{wanted}.")
