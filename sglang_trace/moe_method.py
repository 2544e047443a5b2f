"""The MoE layer of `--quantization trace_nvfp4`: BF16 in, NVFP4 experts out.

The BF16 masters `w13_weight` and `w2_weight` stay in memory as the loader's destination, so a
partial weight update and a repeated post-load pass are right by construction; what the layer
computes with are the code words and scales next to them.

Shape legend: E experts, H hidden size, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.utils import set_weight_attrs
from torch import Tensor, nn

from bridge.errors import TraceError
from bridge.fp4 import NVFP4_BLOCK, Fp4Tensor, pack_nibbles, quantize_weight, unpack_nibbles
from sglang_trace import failure
from sglang_trace.config import QUANTIZATION
from sglang_trace.experts import ActivationRecorder, run_experts


class UnsupportedExperts(TraceError):
    """The model's experts compute something this method does not."""


# What experts of other models have, and how SGLang's MoeRunnerConfig says so.
OTHER_EXPERTS: dict[str, Callable[[Any], bool]] = {
    "an activation other than silu": lambda config: config.activation != "silu",
    "no gate": lambda config: not config.is_gated,
    "router weights before fc1": lambda config: config.apply_router_weight_on_input,
    "a clamped SwiGLU": lambda config: (
        (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit) != (None,) * 3
    ),
    # Earlier releases have neither of these two.
    "a shifted SwiGLU": lambda config: getattr(config, "gemm1_beta", None) is not None,
    "a SwiGLU in FP32": lambda config: getattr(config, "silu_mul_keep_fp32", False),
    "fused shared experts": lambda config: config.num_fused_shared_experts > 0,
    "a routed scaling factor": lambda config: config.routed_scaling_factor not in (None, 1.0),
}


def refuse(found: list[str]) -> None:
    """Refuse experts with any of these properties.

    Raises:
        UnsupportedExperts: naming them.
    """
    with failure.reported():
        if found:
            raise UnsupportedExperts(
                f"The model's experts have {', '.join(found)}, which {QUANTIZATION} does not "
                "compute: use another model or leave --trace-capture out."
            )


class TraceNvfp4MoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Experts in NVFP4 W4A4 on dequantized operands (see `experts`).

    Buffers of the layer, the truth about its weights:
        w13_codes [E, 2I, H/2], w2_codes [E, H, I/2]    uint8, two code words a byte
        w13_scales [E, 2I, H/16], w2_scales [E, H, I/16] uint8, E4M3
        gate_scale, up_scale, down_scale [E]             float32, one a matrix
    and w13_hat, w2_hat: the same numbers, in the dtype that the GEMMs are fastest in.
    """

    def __init__(self) -> None:
        self.recorder: ActivationRecorder | None = None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """Allocate the BF16 destinations of the stock weight loader and the quantized buffers."""
        refuse(["a bias"] if with_bias else [])
        width = intermediate_size_per_partition
        shapes = {
            "w13": (num_experts, 2 * width, hidden_size),
            "w2": (num_experts, hidden_size, width),
        }
        for name, shape in shapes.items():
            master = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(f"{name}_weight", master)
            set_weight_attrs(master, extra_weight_attrs)
            _register_quantized(layer, name, shape, gemm_dtype(master))
        for name in ("gate", "up", "down"):
            layer.register_buffer(f"{name}_scale", torch.ones(num_experts, dtype=torch.float32))

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Check that the experts are of the gated SiLU kind; no runner is needed."""
        refuse([name for name, uses in OTHER_EXPERTS.items() if uses(moe_runner_config)])

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the BF16 masters. Runs after start and after every weight update."""
        for expert in range(layer.w13_weight.shape[0]):
            for name, target in _matrices(layer, expert).items():
                _quantize_into(target, layer, name, expert)

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Compute the layer's output [T, H] from its input and the router's choice."""
        weights, expert_ids, _logits = dispatch_output.topk_output
        return StandardCombineInput(
            hidden_states=run_experts(
                dispatch_output.hidden_states,
                weights,
                expert_ids,
                layer.w13_hat,
                layer.w2_hat,
                self.recorder,
            )
        )


class _Matrix:
    """Where one expert's gate, up or down projection lies in the layer's stacked tensors."""

    def __init__(self, layer: nn.Module, stack: str, expert: int, rows: slice) -> None:
        self.master = getattr(layer, f"{stack}_weight").data[expert, rows]
        self.packed = getattr(layer, f"{stack}_codes")[expert, rows]
        self.scales = getattr(layer, f"{stack}_scales")[expert, rows]
        self.hat = getattr(layer, f"{stack}_hat")[expert, rows]


def _matrices(layer: Any, expert: int) -> dict[str, _Matrix]:
    width = layer.w13_weight.shape[1] // 2
    return {
        "gate": _Matrix(layer, "w13", expert, slice(0, width)),
        "up": _Matrix(layer, "w13", expert, slice(width, 2 * width)),
        "down": _Matrix(layer, "w2", expert, slice(None)),
    }


def _register_quantized(
    layer: nn.Module, stack: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    experts, out, width = shape
    bytes_shape = (experts, out, width // 2)
    scales_shape = (experts, out, width // NVFP4_BLOCK)
    layer.register_buffer(f"{stack}_codes", torch.zeros(bytes_shape, dtype=torch.uint8))
    layer.register_buffer(f"{stack}_scales", torch.zeros(scales_shape, dtype=torch.uint8))
    layer.register_buffer(f"{stack}_hat", torch.zeros(shape, dtype=dtype), persistent=False)


def _quantize_into(target: _Matrix, layer: nn.Module, name: str, expert: int) -> None:
    fp4 = quantize_weight(target.master)
    target.packed.copy_(pack_nibbles(fp4.codes_u8))
    target.scales.copy_(fp4.scales_u8)
    target.hat.copy_(fp4.dequantize(target.hat.dtype))
    getattr(layer, f"{name}_scale")[expert] = fp4.global_scale


def stored_matrices(layer: Any, prefix: str) -> Iterator[tuple[str, Fp4Tensor]]:
    """Yield every expert matrix as stored, under its Hugging Face name.

    `prefix` is the experts' module name, such as "model.layers.3.mlp.experts".
    """
    for expert in range(layer.w13_weight.shape[0]):
        for name, matrix in _matrices(layer, expert).items():
            yield (
                f"{prefix}.{expert}.{name}_proj.weight",
                Fp4Tensor(
                    unpack_nibbles(matrix.packed),
                    matrix.scales,
                    getattr(layer, f"{name}_scale")[expert],
                    NVFP4_BLOCK,
                ),
            )


def gemm_dtype(weight: Tensor) -> torch.dtype:
    """FP32 on a CPU, where BF16 GEMMs are emulated; the weights' own dtype elsewhere."""
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


def moe_layers(model: nn.Module) -> Iterator[tuple[str, Any, TraceNvfp4MoEMethod]]:
    """Yield (module name, layer, method) of every MoE layer that this method serves."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, TraceNvfp4MoEMethod):
            yield name, module, method
