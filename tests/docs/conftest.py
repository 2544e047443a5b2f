"""What the tests of the documents share."""

from __future__ import annotations

import pytest

from bridge.transport.ports import held_port


@pytest.fixture
def free_ports() -> tuple[int, int]:
    return held_port(), held_port()
