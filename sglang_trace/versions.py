"""Which weights computed a row.

Shape legend: n rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bridge.homes import counts_of


class WeightVersions:
    """Labels of the weights in use, in the order of their first row.

    The label is SGLang's weight version. An update that names no new version changes the weights
    all the same, so it gets the label "VERSION+1", then "VERSION+2", unless no row was computed
    since the update before it: then both are one update in several parts.
    """

    def __init__(self) -> None:
        self._first_rows: list[int] = []
        self._labels: list[str] = []
        self._version = ""
        self._unnamed = 0

    @property
    def current(self) -> str:
        """The label of the weights in use."""
        return self._labels[-1]

    def enter(self, version: str | None, first_row: int) -> str:
        """Note that rows from `first_row` on are computed with updated weights; return the label.

        `version` is what SGLang calls them, None if the update did not name them.
        """
        unused = bool(self._first_rows) and self._first_rows[-1] == first_row
        if version not in (None, self._version) or not self._labels:
            self._version, self._unnamed = version or "", 0
        elif not unused:
            self._unnamed += 1
        label = f"{self._version}+{self._unnamed}" if self._unnamed else self._version
        if unused:
            self._labels[-1] = label
        else:
            self._first_rows.append(first_row)
            self._labels.append(label)
        return label

    def split(self, rows_n: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (label, mask bool [n]) for every label that computed some of these rows.

        They are row numbers on the host, which name a bridge too (`bridge.homes`). The label of a
        computed row never changes, so another thread may ask.
        """
        counts_n = torch.from_numpy(counts_of(rows_n.numpy()))
        ages_n = torch.bucketize(counts_n, torch.tensor(self._first_rows), right=True) - 1
        for age in torch.unique(ages_n).tolist():
            yield self._labels[age], ages_n == age
