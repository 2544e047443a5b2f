"""A pytest plugin: end a run whose process gathers threads, before the host suffers.

Unlike RLIMIT_NPROC it also binds root.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LIMIT = 256


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Count this process's threads after every test."""
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > LIMIT:
        pytest.exit(f"{item.nodeid} left {threads} threads", returncode=3)
