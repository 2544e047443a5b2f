"""Where there is no GPU, prefill's flash attention is `stand_in`."""

from __future__ import annotations

import pytest

from sglang_trace.attention import extend_flash
from tests.sglang_trace.attention.stand_in import attention_of_torch
from tests.sglang_trace.kernels.inputs import DEVICE


@pytest.fixture(autouse=True)
def flash_attention_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(extend_flash, "flash_attention", attention_of_torch)
