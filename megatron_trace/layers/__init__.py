"""FP4 in Megatron's layers."""
