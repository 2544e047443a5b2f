"""Rounding to FP4 with straight-through gradients, guided by records; weights kept rounded."""
