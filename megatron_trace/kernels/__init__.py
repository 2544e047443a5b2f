"""Triton kernels of the trainer: what `megatron_trace.rounding` says, bit for bit the same."""
