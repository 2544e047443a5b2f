"""On a GPU the comparison is launched with the forward and read when `guide` ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOKENS = torch.arange(100, 110)


@pytest.fixture
def check() -> Any:
    from megatron_trace.records.input_check import ForwardCheck
    from megatron_trace.records.token_placement import TokenPlacement

    placement = TokenPlacement.packed(TOKENS[None], (0, 6, 10), None)
    return ForwardCheck(placement, torch.device("cuda"))


def params(*bounds: int) -> Any:
    cu = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    return SimpleNamespace(cu_seqlens_q=cu, cu_seqlens_kv=cu)


def test_what_fits_settles_without_an_error(check: Any) -> None:
    check.check_tokens(TOKENS[None].cuda())
    check.check_form(torch.zeros(10, 1, 4, device="cuda"), params(0, 6, 10), 1)
    check.settle()


def test_other_tokens_are_found_when_it_settles(check: Any) -> None:
    from bridge.errors import TokenMismatch

    check.check_tokens(TOKENS.flip(0)[None].cuda())
    with pytest.raises(TokenMismatch, match=r"token 109 at place 0 .* built with 100"):
        check.settle()
    check.settle()  # said once


def test_other_bounds_are_found_when_it_settles(check: Any) -> None:
    from megatron_trace.records.input_check import FormMismatch

    check.check_form(torch.zeros(10, 1, 4, device="cuda"), params(0, 4, 10), 1)
    with pytest.raises(FormMismatch, match=r"bounds \[0, 4, 10\]"):
        check.settle()


def test_no_comparison_waits_for_the_gpu(check: Any) -> None:
    tokens, hidden, bounds = TOKENS[None].cuda(), torch.zeros(10, 1, 4).cuda(), params(0, 6, 10)
    torch.cuda.set_sync_debug_mode("error")
    try:
        check.check_tokens(tokens)
        check.check_form(hidden, bounds, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check.settle()
