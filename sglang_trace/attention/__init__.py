"""Attention over an NVFP4 KV cache."""
