"""The MoE layer of `--quantization trace_nvfp4`: BF16 in, NVFP4 experts out.

Shape legend: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.runtime_context import get_model
from sglang.srt.utils import set_weight_attrs
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from bridge.errors import TraceError
from bridge.formats import NVFP4_BLOCK
from sglang_trace import failure
from sglang_trace.config import QUANTIZATION
from sglang_trace.quantization.expert_weights import Experts, WidthPart
from sglang_trace.quantization.reference import run_experts

if TYPE_CHECKING:
    from sglang_trace.capture.staging import LayerRecorder


class UnsupportedExperts(TraceError):
    """The model's experts compute something this method does not."""


# The GPU kernels write the bit planes of this many code words at a time.
KERNEL_COLUMNS = 32

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
    """Experts in NVFP4 W4A4: by kernels on a GPU, on dequantized operands in torch on a CPU."""

    experts: Experts
    # The ranks that hold the other parts of the experts' width, if there are any.
    group: ProcessGroup | None

    def __init__(self) -> None:
        self.recorder: LayerRecorder | None = None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **_extra_weight_attrs: Any,
    ) -> None:
        """Allocate the quantized matrices; their loader quantizes what it is given."""
        refuse(["a bias"] if with_bias else [])
        width = intermediate_size_per_partition
        part = WidthPart(getattr(layer, "moe_tp_rank", 0), getattr(layer, "moe_tp_size", 1))
        self.experts = Experts(layer, num_experts, hidden_size, width, params_dtype, part)
        self.group = None if part.is_whole else get_tp_group().device_group
        if not part.is_whole and (self.experts.on_gpu or width % NVFP4_BLOCK):
            refuse([f"a width of {width} on each of {part.size} ranks ({layer.w13_weight.device})"])
        if self.experts.on_gpu and (hidden_size % KERNEL_COLUMNS or width % KERNEL_COLUMNS):
            refuse([f"sizes {hidden_size} and {width}, no multiples of {KERNEL_COLUMNS} (GPU)"])
        for weight in (layer.w13_weight, layer.w2_weight):
            set_weight_attrs(weight, {"weight_loader": self.experts.weight_loader})

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Check that the experts are of the gated SiLU kind; no runner is needed."""
        refuse([name for name, uses in OTHER_EXPERTS.items() if uses(moe_runner_config)])

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all matrices are there. Runs after start and after some kinds of update."""
        if not self.experts.loaded and get_model().load_format == "dummy":
            self.experts.load_dummies()
        with failure.reported():
            self.experts.check()

    def apply(self, layer: Any, dispatch_output: Any) -> StandardCombineInput:
        """Compute the layer's output [T, H] from its input and the router's choice."""
        weights_TK, expert_ids_TK, _logits = dispatch_output.topk_output
        x_TH = dispatch_output.hidden_states
        if self.experts.on_gpu:
            y_TH = self.run_kernels(x_TH, weights_TK, expert_ids_TK)
        else:
            hats = layer.w13_hat, layer.w2_hat
            y_TH = run_experts(x_TH, weights_TK, expert_ids_TK, *hats, self.recorder, self.group)
        return StandardCombineInput(hidden_states=y_TH)

    def run_kernels(self, x_TH: Tensor, weights_TK: Tensor, expert_ids_TK: Tensor) -> Tensor:
        """Compute [T, H] by kernels; memory comes from torch, inside a graph from the graph's."""
        from sglang_trace.kernels import moe

        tokens, hidden = x_TH.shape
        y_TH = torch.empty_like(x_TH)
        if tokens == 0:
            return y_TH
        weights = self.experts.weights()
        workspace = moe.Workspace(
            tokens,
            expert_ids_TK.shape[1],
            hidden,
            weights.w13_codes.shape[1] // 2,
            self.experts.count,
            x_TH.device,
        )
        columns = self.recorder.columns(tokens) if self.recorder else None
        moe.run_experts(x_TH, weights_TK, expert_ids_TK, weights, workspace, columns, y_TH)
        return y_TH


def moe_layers(model: nn.Module) -> Iterator[tuple[str, Any, TraceNvfp4MoEMethod]]:
    """Yield (module name, layer, method) of every MoE layer that this method serves."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, TraceNvfp4MoEMethod):
            yield name, module, method
