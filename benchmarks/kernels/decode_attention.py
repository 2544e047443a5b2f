"""Paged decode attention: ours on NVFP4 keys and values beside FlashInfer's kernels, in one run.

Every time is the median of CUDA-graph replays; the calls of a graph rotate among page tables that
share no page, and the pages that they read are together at least four times the L2 cache. Pages are
shuffled. The byte limit is what the keys, values, page numbers, queries and outputs take at the
rate of an elementwise kernel in the same run, each in the format that the kernel reads.

The error is against attention in FP32 on the dequantized values, on some rows of the batch, over
the root-mean-square of the expected output. FlashInfer's FP8 rounds those values once more. A
kernel that is not there, or fails, is a row with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu_timing import Table, copy_rate, git_commit, microseconds, result
from benchmarks.kernels.attention_case import CASES, Case, Inputs, errors
from benchmarks.kernels.attention_peers import BF16, OURS, PEERS, Compiling, Peer

CHECKED_ROWS = 2


def chosen(text: str, known: dict[str, Any]) -> list[Any]:
    """The entries named in a comma-separated list, in that order; all for an empty text.

    Raises:
        typer.BadParameter: for a name that is not there.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    return [known[name] for name in names]


def why(error: Exception) -> str:
    """One line on what went wrong."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:400]


def error_of(inputs: Inputs) -> dict[str, float]:
    """The error of what lies in `inputs.out`, computed from the first set of pages."""
    rows = range(min(CHECKED_ROWS, inputs.case.batch))
    expected = torch.stack([inputs.expected(0, row) for row in rows])
    return errors(inputs.out[: len(rows)], expected)


def measure(table: Table, inputs: Inputs, peer: Peer, times: dict[str, float]) -> None:
    """Add the row of one kernel; `times` has those of the same case so far."""
    case = inputs.case
    shape = case.described()
    try:
        call = peer.prepare(inputs)
        inputs.out.zero_()
        call(0)
        torch.cuda.synchronize()
        error = error_of(inputs)
        us = microseconds(call, len(inputs.tables))
    except Exception as failure:
        table.note(peer.name, case.batch, failed=why(failure), **shape)
        return
    finally:
        inputs.forget_bf16()
    times[peer.name] = us
    more: dict[str, Any] = {}
    if OURS in times and BF16 in times and peer.name in (OURS, BF16):
        more["speedup_of_ours_over_bf16"] = round(times[BF16] / times[OURS], 3)
    nbytes = case.nbytes(peer.bits)
    gigabytes_per_s = round(nbytes / us / 1000)
    table.add(peer.name, case.batch, nbytes, us, gb_per_s=gigabytes_per_s, **error, **more, **shape)


def passes(cases: list[Case], peers: list[Peer]) -> list[tuple[Case, list[Peer]]]:
    """The order: ours and BF16 on every case, then the others, so that a run may be cut short."""
    first = [peer for peer in peers if peer.name in (OURS, BF16)]
    others = [peer for peer in peers if peer not in first]
    return [(case, mine) for mine in (first, others) if mine for case in cases]


def measure_all(
    table: Table,
    order: list[tuple[Case, list[Peer]]],
    compiling: Compiling,
    save: Callable[[], None],
) -> None:
    """Fill the table; `save` is called after every row."""
    for case, peers in order:
        inputs = Inputs(case, case.sets(), "cuda")
        times: dict[str, float] = {}
        for peer in peers:
            compiling.wait(peer, case)
            measure(table, inputs, peer, times)
            save()
            torch.cuda.empty_cache()


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/h200/decode_attention.json"
    ),
    peers: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    cases: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    commit: Annotated[str, typer.Option(help="What is measured; default: ask git.")] = "",
) -> None:
    """Times every kernel on every case; writes JSON after every row."""
    wanted: list[Peer] = chosen(peers, PEERS)
    shapes: list[Case] = chosen(cases, {case.name: case for case in CASES})
    commit = commit or git_commit()
    out.parent.mkdir(parents=True, exist_ok=True)
    table = Table(copy_rate())
    torch.cuda.empty_cache()
    print(f"copy: {table.rate:.0f} GB/s", flush=True)

    def save() -> None:
        report = result(
            "decode_attention", table, commit, flashinfer=installed("flashinfer-python")
        )
        out.write_text(json.dumps(report, indent=1) + "\n")

    order = passes(shapes, wanted)
    compiling = Compiling((peer, case) for case, mine in order for peer in mine)
    try:
        measure_all(table, order, compiling, save)
    finally:
        compiling.stop()


def installed(package: str) -> str | None:
    """The version of a package, None without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    typer.run(main)
