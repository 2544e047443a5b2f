"""What ``status`` and ``verify`` say about a target, as data."""

from dataclasses import dataclass, field

from patches.apply.state import State, Where, inspect, require_upstream, series_for
from patches.config import Target
from patches.errors import NotInstalledError, PatchError, file_errors_explained
from patches.format.patchfile import GROUPS


@dataclass(frozen=True)
class Report:
    """One target. ``state`` is a State, or "unreadable" if it is unknown.

    ``series`` is the version of the series that fits, with its number of patches, the upstream
    lines that they add or remove by group, and the functions of our ``hooks.py`` that they call.
    ``faults`` maps each file at fault to its problem; ``remedy`` is the fix, empty if patched.
    """

    target: str
    state: str
    remedy: str
    installed: str | None = None
    site: str | None = None
    series: str | None = None
    patches: int = 0
    edited_lines: dict[str, int] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    faults: dict[str, str] = field(default_factory=dict)


def report(target: Target, where: Where = None) -> Report:
    """Look at a target and report; never raises for what is wrong with its files."""
    try:
        with file_errors_explained():
            return _report_found(target, where)
    except NotInstalledError as error:
        return Report(target.name, State.NOT_INSTALLED, str(error))
    except PatchError as error:
        return Report(target.name, "unreadable", str(error))


def _report_found(target: Target, where: Where) -> Report:
    upstream = require_upstream(target, where)
    series = series_for(target, upstream)
    found = inspect(target, upstream, series)
    return Report(
        target=target.name,
        state=found.state,
        remedy=found.remedy(),
        installed=upstream.version,
        site=str(upstream.site),
        series=None if series is None else series.version,
        patches=0 if series is None else len(series.patches),
        edited_lines={} if series is None else series.edited_lines(),
        hooks=() if series is None else series.hooks,
        faults=found.faults,
    )


def count_lines(edited: dict[str, int]) -> str:
    """Edited lines by group as one phrase."""
    return ", ".join(f"{edited[group]} {group}" for group in GROUPS if group in edited) or "-"
