"""FP4 arithmetic: NVFP4 quantization, records of a few bits, rounding guided by them."""
