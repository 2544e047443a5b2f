"""Whether a micro-batch's records had any effect on the forwards under `guide`."""

from __future__ import annotations

from collections.abc import Set

from bridge.errors import TraceError
from bridge.layout import Site


class NothingGuided(TraceError):
    """A forward ran under `guide` and nothing in it asked for the records."""


class Coverage:
    """What of a model has run since the last `require`.

    A pipeline stage may have no layer, or none that records: that is no mistake. A model that
    `enable_fp4` never marked, or marked for other sites than the records guide, is one.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._ran = False
        self._marked: set[Site] = set()
        self._possible: set[Site] = set()

    def model(self) -> None:
        """Note that a marked model, or a stage of one, runs."""
        self._ran = True

    def layer(self, marked: Set[Site], possible: Set[Site]) -> None:
        """Note that a layer runs which asks for records of `marked` of its `possible` sites."""
        self._ran = True
        self._marked |= marked
        self._possible |= possible

    def require(self, guided: Set[Site]) -> None:
        """Raise NothingGuided unless the forwards could follow records of `guided` sites."""
        ran, marked, possible = self._ran, self._marked, self._possible
        self._begin()
        if not ran:
            raise NothingGuided(
                "No model in FP4 ran under guide(), so its records guided nothing: call "
                "enable_fp4(model) before, and run the forward inside the block."
            )
        if guided & possible and not guided & marked:
            names = ", ".join(sorted(guided & possible))
            raise NothingGuided(
                f"The records guide {names} and enable_fp4 left them in the model's own precision: "
                "turn on experts or kv_cache in its TraceTrainerConfig, or guide other sites."
            )
