"""How often two bits of a block scale are ambiguous or read wrong, against a trainer that is off.

A simulation: the rollout's values are the trainer's plus Gaussian noise of a given share of their
standard deviation, rows of 2048 from two distributions. Counted over blocks of 16. Values of a
trained model are not in it; the demo counts the same on records of the real engines.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.command_line import command_line
from bridge.fp4.nvfp4 import block_scales, encode_e4m3, quantize_nvfp4, token_scale
from bridge.fp4.scale_bits import LOW_SCALE_MASK, read_low_scales

WIDTH = 2048
NOISES = (0.002, 0.01, 0.03, 0.1, 0.2, 0.3)
Draw = Callable[[int, torch.Generator], Tensor]


def gaussian(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, WIDTH, generator=generator)


def laplace(rows: int, generator: torch.Generator) -> Tensor:
    """Of standard deviation 1."""
    magnitude = torch.empty(rows, WIDTH).exponential_(2**0.5, generator=generator)
    return magnitude * torch.randint(0, 2, (rows, WIDTH), generator=generator).mul_(2).sub_(1)


DISTRIBUTIONS: dict[str, Draw] = {"gaussian": gaussian, "laplace": laplace}


def measure(name: str, noise: float, rows: int) -> dict[str, Any]:
    """One row of the result; shares are of all blocks."""
    generator = torch.Generator().manual_seed(0)
    own = DISTRIBUTIONS[name](rows, generator)
    theirs = own + noise * torch.randn(own.shape, generator=generator)
    rollout = quantize_nvfp4(theirs, token_scale(theirs))
    unrounded = block_scales(own, rollout.global_scale)
    read = read_low_scales(rollout.scales_u8 & LOW_SCALE_MASK, unrounded)
    apart = (encode_e4m3(unrounded).to(torch.int16) - rollout.scales_u8.to(torch.int16)).abs()
    wrong = read.codes_u8 != rollout.scales_u8

    def share(blocks: Tensor) -> float:
        return blocks.float().mean().item()

    return {
        "values": name,
        "noise": noise,
        "blocks": wrong.numel(),
        "code_differs": share(apart > 0),
        "more_than_one_apart": share(apart > 1),
        "ambiguous": share(read.ambiguous),
        "ambiguous_and_read_right": share(read.ambiguous & ~wrong),
        "wrong": share(wrong),
        "wrong_and_not_ambiguous": share(wrong & ~read.ambiguous),
    }


def main(
    out: Annotated[Path, typer.Option(help="Where to write the JSON.")] = Path(
        "benchmarks/results/cpu/low_scales.json"
    ),
    rows: Annotated[int, typer.Option(help="Rows of 2048 values for each figure.")] = 8192,
) -> None:
    """Measure and write."""
    table = []
    for name in DISTRIBUTIONS:
        for noise in NOISES:
            table.append(measure(name, noise, rows))
            print(json.dumps(table[-1]), file=sys.stderr)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    result = {
        "name": "low_scales",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command_line("benchmarks.numerics.scale_bits"),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "versions": {"torch": version("torch")},
        "rows": table,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
