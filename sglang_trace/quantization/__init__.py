"""SGLang's quantization method `trace_nvfp4`: experts in NVFP4."""
