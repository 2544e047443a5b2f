"""Triton kernels: what `bridge.fp4.nvfp4` and `experts` say, at GPU speed and bit for bit the same.

Triton runs them on a GPU, or in its interpreter where TRITON_INTERPRET=1 was set before the first
import of triton; arithmetic that only one of the two can do is avoided or named `NATIVE`.
"""
