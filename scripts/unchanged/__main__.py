"""`python -m scripts.unchanged`: do the patches leave the upstreams as they were, switched off?

Everything is measured on a released and on a patched copy of each upstream and must be equal to
the last bit. Exit code 0 only if it is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from bridge.errors import TraceError
from examples.tiny_model import make_checkpoint
from patches import PatchError
from scripts.unchanged import server, training, upstream_tests
from scripts.unchanged.measured import Comparison, Measured, compare
from scripts.unchanged.report import print_tables, write_json
from scripts.unchanged.sites import Site, make_sites

TARGETS = {
    "sglang": "https://github.com/sgl-project/sglang",
    "megatron-core": "https://github.com/NVIDIA/Megatron-LM",
}


def main(
    sglang: Annotated[str | None, typer.Option(help="Version; default: the installed.")] = None,
    megatron_core: Annotated[str | None, typer.Option(help="Likewise.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="One target of the two.")] = None,
    upstream: Annotated[
        list[Path] | None,
        typer.Option(
            "--upstream-tests",
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="A checkout of SGLang or Megatron-LM at that version; once for each.",
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all of it here.")] = None,
) -> None:
    """Compare released and patched upstreams with everything of ours switched off."""
    compared: list[Comparison] = []
    notes: list[str] = []
    versions = {"sglang": sglang, "megatron-core": megatron_core}
    try:
        with tempfile.TemporaryDirectory(prefix="unchanged-") as work:
            for target in only or TARGETS:
                rows, note = _compare(target, versions[target], upstream or [], Path(work))
                compared, notes = [*compared, *rows], [*notes, note]
    except (TraceError, PatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print_tables(compared, notes)
    if json_file is not None:
        write_json(json_file, {"torch": version_of("torch")}, compared, notes)
    if not all(each.same for each in compared):
        raise typer.Exit(1)


def _compare(
    target: str, version: str | None, checkouts: list[Path], work: Path
) -> tuple[list[Comparison], str]:
    """Compare all there is of one target, and say what its own tests were."""
    sites = make_sites(target, version, work)
    part = f"{target} {sites[0].version}"
    if target == "sglang":
        model = make_checkpoint(work / "model")
        compared = _on_both(part, sites, lambda site: server.measure(site, model, work))
    else:
        compared = _on_both(part, sites, lambda site: training.measure(site, work))
    checkout = upstream_tests.find_checkout(target, checkouts)
    if checkout is None:
        return compared, (
            f"{part}: its own unit tests were not run; `git clone {TARGETS[target]}`, check this "
            "version out and pass --upstream-tests DIR."
        )
    place = upstream_tests.copy_suite(target, checkout, work / f"{target}-checkout")
    compared += _on_both(part, sites, lambda site: upstream_tests.measure(site, place, work))
    return compared, f"{part}: {upstream_tests.describe(target, checkout, sites[0])}"


def _on_both(
    part: str, sites: tuple[Site, Site], measure: Callable[[Site], list[Measured]]
) -> list[Comparison]:
    """Measure both copies at the same time and compare."""
    with ThreadPoolExecutor(2) as pool:
        released, patched = pool.map(measure, sites)
    return compare(part, released, patched)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
