"""Fingerprints of weights: equal while every bit is equal, computed where the weights are.

Nothing that torch keeps says reliably whether a parameter still holds what it held: writes through
`.data`, as optimizers and parameter gathers make them, leave its version counter as it was.

Shape legend: O, I rows and columns of a matrix, N 64-bit words of one row.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_WORD_BYTES = 8


@torch.no_grad()
def fingerprint(matrix_OI: Tensor) -> Tensor:
    """Return an int64 [] that changes with any bit and any move of the values.

    Every 64-bit word is multiplied with an odd number of its column and every row's sum with one of
    its row, so a single change is always seen; the chance that many changes cancel out is about
    2**-48. One pass over the matrix, in a copy of its size.

    Args:
        matrix_OI: any dtype; a row takes a multiple of 8 bytes, as rows of whole FP4 blocks do.
    """
    words_ON = _words(matrix_OI.detach())
    rows, columns = words_ON.shape
    row_O, column_N = _odd_numbers(rows, columns, str(matrix_OI.device))
    mixed_ON = words_ON * column_N
    # A product carries what changed in a word's high bits nowhere but in its own high bits.
    mixed_ON ^= mixed_ON >> 32
    return (mixed_ON.sum(-1) * row_O).sum()


def _words(matrix_OI: Tensor) -> Tensor:
    """View a matrix as int64 [O, N]; copied where it does not lie in whole words."""
    offset = matrix_OI.storage_offset() * matrix_OI.element_size()
    aligned = matrix_OI.is_contiguous() and offset % _WORD_BYTES == 0
    return (matrix_OI if aligned else matrix_OI.clone(memory_format=torch.contiguous_format)).view(
        torch.int64
    )


@lru_cache(maxsize=64)
def _odd_numbers(rows: int, columns: int, device: str) -> tuple[Tensor, Tensor]:
    """Return fixed odd numbers for the rows and the columns: int64 [rows], [columns]."""
    generator = torch.Generator().manual_seed(rows * 65_537 + columns)
    info = torch.iinfo(torch.int64)
    drawn = torch.randint(info.min, info.max, (rows + columns,), generator=generator) | 1
    here = drawn.to(device)
    return here[:rows], here[rows:]
