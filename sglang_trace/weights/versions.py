"""Which weights computed a row.

Shape legend: n rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bridge.transport.bridge_sharding import counts_of


class Weights(NamedTuple):
    """A label and the digest of the weights behind it, "" while that is not known.

    The digest tells two weights of one label from each other (`weight_digest`).
    """

    label: str
    digest: str = ""


class WeightVersions:
    """The weights in use, in the order of their first row.

    The label is SGLang's weight version. An update that names no new version changes the weights
    all the same, so it gets the label "VERSION+1", then "VERSION+2", unless no row was computed
    since the update before it: then both are one update in several parts.
    """

    def __init__(self) -> None:
        self._first_rows: list[int] = []
        self._weights: list[Weights] = []
        self._version = ""
        self._unnamed = 0

    @property
    def current(self) -> Weights:
        """The weights in use."""
        return self._weights[-1]

    def seal(self, digest: str) -> None:
        """Say what the digest of the weights in use is, before a row of theirs is sent."""
        self._weights[-1] = Weights(self.current.label, digest)

    def enter(self, version: str | None, first_row: int) -> str:
        """Note that rows from `first_row` on are computed with updated weights; return the label.

        `version` is what SGLang calls them, None if the update did not name them.
        """
        unused = bool(self._first_rows) and self._first_rows[-1] == first_row
        if version not in (None, self._version) or not self._weights:
            self._version, self._unnamed = version or "", 0
        elif not unused:
            self._unnamed += 1
        label = f"{self._version}+{self._unnamed}" if self._unnamed else self._version
        if unused:
            self._weights[-1] = Weights(label)
        else:
            self._first_rows.append(first_row)
            self._weights.append(Weights(label))
        return label

    def split(self, rows_n: Tensor) -> Iterator[tuple[Weights, Tensor]]:
        """Yield (weights, mask bool [n]) for all weights that computed some of these rows.

        They are row numbers on the host, which name a bridge too
        (`bridge.transport.bridge_sharding`). The weights of a computed row never change, so another
        thread may ask.
        """
        counts_n = torch.from_numpy(counts_of(rows_n.numpy()))
        ages_n = torch.bucketize(counts_n, torch.tensor(self._first_rows), right=True) - 1
        for age in torch.unique(ages_n).tolist():
            yield self._weights[age], ages_n == age
