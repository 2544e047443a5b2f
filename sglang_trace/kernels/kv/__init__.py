"""Triton kernels that read and write the FP4 KV pool."""
