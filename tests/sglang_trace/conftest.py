"""One tiny checkpoint and one real server for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# examples/ and the helpers beside this file are not installed packages.
sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.tiny_model import make_checkpoint
from tests.sglang_trace.live_server import LiveServer, serving
from tests.sglang_trace.reference_model import ReferenceModel

# Small enough that a handful of requests overflows the pool, and a prompt takes several chunks.
POOL_TOKENS = 640
CHUNK_TOKENS = 48
SERVER_FLAGS = (
    *("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", str(CHUNK_TOKENS)),
    *("--max-running-requests", "16", "--schedule-conservativeness", "0.05"),
    "--enable-return-routed-experts",
    # An idle scheduler otherwise spins, and takes the cores from the server under test.
    "--sleep-on-idle",
)
CAPTURE_FLAGS = (
    "--trace-capture",
    *("--trace-sites", "fc1,fc2,k,v,routes", "--trace-layers", "all", "--trace-bits", "4"),
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> ReferenceModel:
    return ReferenceModel(checkpoint)


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The real server, recording everything in full code words to its own bridge on disk."""
    place = tmp_path_factory.mktemp("server")
    flags = (*SERVER_FLAGS, *CAPTURE_FLAGS, "--trace-dir", str(place / "records"))
    with serving(checkpoint, place / "log", *flags) as live:
        yield live


@pytest.fixture(scope="session")
def plain_server(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """The same server without capture."""
    flags = (*SERVER_FLAGS, "--quantization", "trace_nvfp4", "--kv-cache-dtype", "nvfp4")
    log = tmp_path_factory.mktemp("plain") / "log"
    with serving(checkpoint, log, *flags) as live:
        yield live
