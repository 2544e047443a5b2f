"""Attention over an NVFP4 KV cache: SGLang's backend `trace_fp4` and its kernels.

What attention reads is what is stored: every key and value comes out of the pool, the current
token's included, so the trainer can reproduce it without knowing where prefill chunks began.
"""

# Value of --attention-backend.
ATTENTION_BACKEND = "trace_fp4"


def is_hopper() -> bool:
    """Whether torch's first GPU is of the Hopper generation, for which the kernels are made."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] == 9
