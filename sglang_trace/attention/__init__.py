"""Attention over an NVFP4 KV cache: SGLang's backend `trace_fp4` and its kernels.

What attention reads is what is stored: every key and value comes out of the pool, the current
token's included, so the trainer can reproduce it without knowing where prefill chunks began.
"""
