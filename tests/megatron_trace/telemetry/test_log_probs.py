from typing import Any

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_a_float32_softmax(
    one_rank: Any, dtype: torch.dtype
) -> None:
    from megatron_trace.telemetry.log_probs import token_logprobs

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 5, 11, generator=generator)).to(dtype).requires_grad_()
    tokens = torch.randint(11, (2, 5), generator=generator)
    ours = token_logprobs(logits, tokens)
    expected = logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected)
    (grad,) = torch.autograd.grad(ours.sum(), logits, retain_graph=True)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(grad, expected_grad)
