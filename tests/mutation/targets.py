"""Which modules are mutated, and which tests are to notice it.

Only tests that start no server and compile no kernel are listed, so that a mutation costs about a
second. The order matters for the time alone: the first test that fails ends a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """One source file, relative to the checkout, and the test files that are run on it."""

    path: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """The dotted name under which the file is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def source(self) -> str:
        return Path(self.path).read_text()


def _bridge(path: str, *tests: str) -> Target:
    return Target(f"bridge/{path}.py", tuple(f"tests/bridge/test_{test}.py" for test in tests))


_LAYOUT = ("layout_vectors", "layout_bounds", "shard", "layout")

TARGETS = (
    _bridge("fp4", "fp4_vectors", "fp4"),
    _bridge("guidance", "fp4_vectors", "guidance"),
    _bridge("lowbits", "fp4_vectors", "lowbits"),
    _bridge("low_scales", "fp4_vectors", "low_scales"),
    _bridge("formats", "fp4_vectors", "layout_vectors"),
    *(
        _bridge(f"layout/{name}", *_LAYOUT)
        for name in (
            *("__init__", "rank_shards", "record", "selection"),
            *("shape", "shard", "site", "tensor_slice"),
        )
    ),
    _bridge("answers", "answers"),
    _bridge("homes", "homes"),
    _bridge("digest", "digest"),
    _bridge("store/row_sums", "row_sums"),
    *(
        Target(f"megatron_trace/{name}.py", ("tests/megatron_trace/test_placed_rows.py",))
        for name in ("placed_rows", "sequences")
    ),
)
