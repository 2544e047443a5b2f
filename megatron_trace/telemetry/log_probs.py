"""Log-probabilities of given tokens.

Shape legend: s sequence, b batch, v this rank's part of the vocabulary.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_logprobs(logits_bsv: Tensor, tokens_bs: Tensor) -> Tensor:
    """Return log p(tokens) in float32, [b, s], differentiable.

    The logits at position p predict the token at p + 1: to score the tokens of a sequence, pass
    them shifted by one (`torch.roll(tokens, -1, dims=1)`) and ignore the last position.

    Args:
        logits_bsv: what a GPTModel without labels returns, this tensor-parallel rank's part of the
            vocabulary.
        tokens_bs: int64 token ids in [0, whole vocabulary).
    """
    logits_sbv = logits_bsv.transpose(0, 1).float().contiguous()
    targets_sb = tokens_bs.transpose(0, 1).contiguous()
    loss_sb: Tensor = vocab_parallel_cross_entropy(logits_sbv, targets_sb)
    return -loss_sb.transpose(0, 1)
