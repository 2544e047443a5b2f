"""This rank's share of the micro-batch's tokens and of a row's values.

Shape legend: N tokens of the micro-batch in model order.
"""

from dataclasses import dataclass

from torch.distributed import ProcessGroup

from bridge.errors import TraceError


class TokenCountMismatch(TraceError):
    """The model computes another number of tokens than the micro-batch describes."""


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group, and whether tokens are split over it (sequence parallelism)."""

    group: ProcessGroup
    splits_tokens: bool

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.group.rank()

    def part_of(self, size: int) -> tuple[int, int]:
        """Return which of `size` equal things that are split over the group this rank has."""
        return self.rank * size // self.size, (self.rank + 1) * size // self.size

    def tokens_of(self, num_tokens: int, computed: int) -> slice:
        """Return which of a micro-batch's N tokens a layer computes that sees `computed` of them.

        Raises:
            TokenCountMismatch: if that is neither all of them nor this rank's part.
        """
        parts = self.size if self.splits_tokens else 1
        if computed * parts != num_tokens:
            raise TokenCountMismatch(
                f"The model computes {computed * parts} tokens, the micro-batch describes "
                f"{num_tokens}: build it from the same tokens, padding included."
            )
        start = self.rank * computed if self.splits_tokens else 0
        return slice(start, start + computed)
