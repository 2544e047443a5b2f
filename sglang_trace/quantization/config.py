"""`--quantization trace_nvfp4`: experts in NVFP4 W4A4, everything else in the checkpoint's BF16.

SGLang's table of methods holds this class, so importing it must not import SGLang's layers.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from torch import nn

from sglang_trace.config import QUANTIZATION


class TraceNvfp4Config(QuantizationConfig):  # type: ignore[misc]
    """Selects `TraceNvfp4MoEMethod` for experts and no quantization for everything else."""

    @classmethod
    def get_name(cls) -> str:
        """Return the value of `--quantization`."""
        return QUANTIZATION

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """BF16: the only dtype in which every dequantized operand is exact and fast."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device that runs BF16 torch."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the checkpoint is plain BF16."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TraceNvfp4Config:
        """There is nothing to configure."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Quantize experts, leave linear layers alone, leave the rest to its default."""
        from sglang.srt.layers.linear import LinearBase
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        from sglang_trace.quantization.moe_method import TraceNvfp4MoEMethod

        if isinstance(layer, FusedMoE):
            return TraceNvfp4MoEMethod()
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod()
        return None

    def get_scaled_act_names(self) -> list[str]:
        """None: no activation function is rescaled."""
        return []
