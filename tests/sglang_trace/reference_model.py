"""The tiny Qwen3-MoE written out from its checkpoint, token by token's worth of math, no SGLang.

An independent statement of what the rollout computes with `--quantization trace_nvfp4` and
`--kv-cache-dtype nvfp4`: same roundings at the same places, everything else in BF16 with ordinary
torch functions. It does not match SGLang bit for bit (other GEMM shapes, other RoPE precision), so
tests compare shares of equal code words.

Shape legend: T tokens, H hidden size, N heads, D head size, K experts a token, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, quantize_weight, token_scale
from bridge.layout import Site

ONE = torch.ones(())


@dataclass
class Trace:
    """What the reference quantized, by site and layer, and the experts it chose [T, layers, K]."""

    sites: dict[tuple[Site, int], Fp4Tensor]
    routes: Tensor
    logits: Tensor


class ReferenceModel:
    def __init__(self, checkpoint: Path) -> None:
        self.config = AutoConfig.from_pretrained(checkpoint)
        self.weights = load_file(checkpoint / "model.safetensors")
        self.experts = {
            name: quantize_weight(weight).dequantize(torch.bfloat16)
            for name, weight in self.weights.items()
            if ".experts." in name
        }

    def run(self, tokens: list[int]) -> Trace:
        x_TH = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)].float()
        sites: dict[tuple[Site, int], Fp4Tensor] = {}
        routes = []
        for layer in range(self.config.num_hidden_layers):
            added = self._attention(layer, self._norm(x_TH, layer, "input"), sites)
            x_TH = self._add(x_TH, added)
            added, ids_TK = self._experts(layer, self._norm(x_TH, layer, "post_attention"), sites)
            x_TH = self._add(x_TH, added)
            routes.append(ids_TK)
        final = self._rms(x_TH, self.weights["model.norm.weight"])
        logits = linear(final, self.weights["lm_head.weight"]).float()
        return Trace(sites, torch.stack(routes, dim=1), logits)

    def _norm(self, x: Tensor, layer: int, name: str) -> Tensor:
        return self._rms(x, self.weights[f"model.layers.{layer}.{name}_layernorm.weight"])

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale * weight).to(torch.bfloat16)

    def _add(self, x_TH: Tensor, added: Tensor) -> Tensor:
        """Add to the residual, which is BF16 between layers while the norm sees the FP32 sum."""
        return x_TH.to(torch.bfloat16).float() + added.float()

    def _linear(self, x: Tensor, layer: int, name: str) -> Tensor:
        return linear(x, self.weights[f"model.layers.{layer}.{name}.weight"])

    def _attention(self, layer: int, x_TH: Tensor, sites: dict) -> Tensor:
        q, k, v = (
            self._linear(x_TH, layer, f"self_attn.{name}_proj").unflatten(
                -1, (-1, self.config.head_dim)
            )
            for name in "qkv"
        )
        prefix = f"model.layers.{layer}.self_attn"
        q = self._rotate(self._rms(q, self.weights[f"{prefix}.q_norm.weight"]))
        k = self._rotate(self._rms(k, self.weights[f"{prefix}.k_norm.weight"]))
        sites[Site.K, layer], sites[Site.V, layer] = (
            quantize_nvfp4(k, ONE),
            quantize_nvfp4(v, ONE),
        )
        k, v = (sites[site, layer].dequantize(x_TH.dtype) for site in (Site.K, Site.V))
        heads = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self._linear(out[0].transpose(0, 1).flatten(1), layer, "self_attn.o_proj")

    def _rotate(self, x_TND: Tensor) -> Tensor:
        half = self.config.head_dim // 2
        base = self.config.rope_parameters["rope_theta"]
        frequency = base ** (-torch.arange(half) / half)
        angle = torch.arange(len(x_TND)).unsqueeze(-1) * frequency
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        first, second = x_TND.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return rotated.to(x_TND.dtype)

    def _experts(self, layer: int, x_TH: Tensor, sites: dict) -> tuple[Tensor, Tensor]:
        probabilities = self._linear(x_TH, layer, "mlp.gate").float().softmax(-1)
        weights_TK, ids_TK = probabilities.topk(self.config.num_experts_per_tok, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        x_fp4 = quantize_nvfp4(x_TH, token_scale(x_TH))
        x_hat = x_fp4.dequantize(x_TH.dtype)
        h_TKI = torch.stack(
            [
                torch.stack([self._gate_up(layer, expert, x) for expert in ids.tolist()])
                for ids, x in zip(ids_TK, x_hat, strict=True)
            ]
        )
        h_fp4 = quantize_nvfp4(h_TKI, token_scale(h_TKI))
        sites[Site.FC1, layer], sites[Site.FC2, layer] = x_fp4, h_fp4
        h_hat = h_fp4.dequantize(x_TH.dtype)
        y_TKH = torch.stack(
            [
                torch.stack(
                    [
                        linear(h, self._expert(layer, expert, "down"))
                        for expert, h in zip(ids.tolist(), hs, strict=True)
                    ]
                )
                for ids, hs in zip(ids_TK, h_hat, strict=True)
            ]
        )
        return (y_TKH.float() * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype), ids_TK

    def _gate_up(self, layer: int, expert: int, x_H: Tensor) -> Tensor:
        gate = linear(x_H, self._expert(layer, expert, "gate"))
        return F.silu(gate) * linear(x_H, self._expert(layer, expert, "up"))

    def _expert(self, layer: int, expert: int, name: str) -> Tensor:
        return self.experts[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """A BF16 matrix product with FP32 accumulation."""
    return F.linear(x.float(), weight.float()).to(torch.bfloat16)
