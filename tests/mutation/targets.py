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
    return Target(f"bridge/{path}.py", tuple(f"tests/bridge/{test}.py" for test in tests))


_VECTORS = "fp4/test_nvfp4_vectors"
_LAYOUT = tuple(
    f"layout/test_{name}" for name in ("layout_vectors", "layout_bounds", "shard", "record")
)

TARGETS = (
    _bridge("fp4/nvfp4", _VECTORS, "fp4/test_nvfp4"),
    _bridge("fp4/guided_rounding", _VECTORS, "fp4/test_guided_rounding"),
    _bridge("fp4/bit_planes", _VECTORS, "fp4/test_bit_planes"),
    _bridge("fp4/scale_bits", _VECTORS, "fp4/test_scale_bits"),
    _bridge("formats", _VECTORS, "layout/test_layout_vectors"),
    *(
        _bridge(f"layout/{name}", *_LAYOUT)
        for name in (
            *("__init__", "rank_shards", "record", "columns"),
            *("shape", "shard", "site", "tensor_slice"),
        )
    ),
    _bridge("client/merge", "client/test_merge"),
    _bridge("transport/bridge_sharding", "transport/test_bridge_sharding"),
    _bridge("fp4/digest", "fp4/test_digest"),
    _bridge("store/checksums", "store/test_checksums"),
    *(
        Target(f"megatron_trace/{name}.py", ("tests/megatron_trace/records/test_aligned_rows.py",))
        for name in ("records/aligned_rows", "records/token_placement")
    ),
)
