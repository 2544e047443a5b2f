"""An FP4 rollout of Qwen3-MoE in plain torch, float32, that shares no code with megatron_trace.

It computes one sequence as the rollout engine does (W4A4 experts, NVFP4 keys and values, router
probabilities after fc2), and writes its records with `bridge`, so the trainer has something to
agree with.

Shape legend: T tokens, H hidden size, N query heads, G key/value heads, D head size, K slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bridge.client.records import TrajectoryRecords
from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, quantize_weight, token_scale
from bridge.layout import ModelShape, Part, RecordLayout, Site
from bridge.wire import TrajectoryState

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=64,
    moe_intermediate_size=32,
    num_experts=8,
    top_k=2,
    num_kv_heads=2,
    head_dim=32,
    moe_layers=(0, 1, 2, 3),
    attention_layers=(0, 1, 2, 3),
)

HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": SHAPE.hidden_size,
    "num_hidden_layers": SHAPE.num_layers,
    "num_attention_heads": 4,
    "num_key_value_heads": SHAPE.num_kv_heads,
    "head_dim": SHAPE.head_dim,
    "intermediate_size": SHAPE.moe_intermediate_size,
    "moe_intermediate_size": SHAPE.moe_intermediate_size,
    "num_experts": SHAPE.num_experts,
    "num_experts_per_tok": SHAPE.top_k,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
}

Weights = dict[str, Tensor]


def random_weights(seed: int = 0) -> Weights:
    """Weights by Hugging Face name, spread so that logits differ by a few units."""
    generator = torch.Generator().manual_seed(seed)
    vocab, hidden, heads = HF_CONFIG["vocab_size"], SHAPE.hidden_size, 4 * SHAPE.head_dim
    kv_width, width = SHAPE.num_kv_heads * SHAPE.head_dim, SHAPE.moe_intermediate_size

    def matrix(*shape: int, spread: float = 0.15) -> Tensor:
        return spread * torch.randn(*shape, generator=generator)

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, spread=1.0),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": matrix(vocab, hidden, spread=0.3),
    }
    for i in range(SHAPE.num_layers):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "post_attention_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": matrix(heads, hidden),
            "self_attn.k_proj.weight": matrix(kv_width, hidden),
            "self_attn.v_proj.weight": matrix(kv_width, hidden),
            "self_attn.o_proj.weight": matrix(hidden, heads),
            "self_attn.q_norm.weight": norm(SHAPE.head_dim),
            "self_attn.k_norm.weight": norm(SHAPE.head_dim),
            "mlp.gate.weight": matrix(SHAPE.num_experts, hidden),
        }
        for e in range(SHAPE.num_experts):
            layer[f"mlp.experts.{e}.gate_proj.weight"] = matrix(width, hidden)
            layer[f"mlp.experts.{e}.up_proj.weight"] = matrix(width, hidden)
            layer[f"mlp.experts.{e}.down_proj.weight"] = matrix(hidden, width)
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return weights


class ReferenceRollout:
    """Computes sequences in FP4 and records them.

    `noise` multiplies every value to be rounded by 1 + noise * N(0, 1), as another kernel's
    summation order would.
    """

    def __init__(
        self, weights: Weights, layout: RecordLayout, noise: float = 0.0, seed: int = 0
    ) -> None:
        self.layout = layout
        self._weights = weights
        self._noise = noise
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def run(
        self, tokens: Tensor, name: str = "t", version: str = "1"
    ) -> tuple[TrajectoryRecords, Tensor]:
        """Return the records and the logits [T, vocabulary] of int64 tokens [T].

        As after a rollout, the last token has no row.
        """
        self._forward = torch.zeros(len(tokens), self.layout.row_bytes(Part.FORWARD)).byte()
        self._kv = torch.zeros(len(tokens), self.layout.row_bytes(Part.KV)).byte()
        x_TH = self._weights["model.embed_tokens.weight"][tokens]
        for layer in range(SHAPE.num_layers):
            w = _layer(self._weights, layer)
            x_TH = x_TH + self._attention(w, layer, _norm(x_TH, w["input_layernorm.weight"]))
            normed_TH = _norm(x_TH, w["post_attention_layernorm.weight"])
            x_TH = x_TH + self._experts(w, layer, normed_TH)
        logits = _norm(x_TH, self._weights["model.norm.weight"]) @ self._weights["lm_head.weight"].T
        return self._records(tokens, name, version), logits

    def _attention(self, w: Mapping[str, Tensor], layer: int, x_TH: Tensor) -> Tensor:
        d = SHAPE.head_dim
        q, k, v = ((x_TH @ w[f"self_attn.{n}_proj.weight"].T).unflatten(1, (-1, d)) for n in "qkv")
        q = _rotary(_norm(q, w["self_attn.q_norm.weight"]))
        k = _rotary(_norm(k, w["self_attn.k_norm.weight"]))
        k, v = self._cached(Site.K, layer, k), self._cached(Site.V, layer, v)
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        scores = torch.einsum("tnd,snd->nts", q, k) / d**0.5
        future = torch.ones(len(x_TH), len(x_TH), dtype=torch.bool).triu(1)
        probs = scores.masked_fill(future, -torch.inf).softmax(-1)
        return torch.einsum("nts,snd->tnd", probs, v).flatten(1) @ w["self_attn.o_proj.weight"].T

    def _cached(self, site: Site, layer: int, states: Tensor) -> Tensor:
        fp4 = quantize_nvfp4(self._noisy(states.flatten(1)), torch.ones(()))
        self._write(site, layer, fp4.codes_u8, fp4.scales_u8, None)
        return fp4.dequantize().view_as(states)

    def _experts(self, w: Mapping[str, Tensor], layer: int, x_TH: Tensor) -> Tensor:
        probs_TE = (x_TH @ w["mlp.gate.weight"].T).softmax(-1)
        probs_TK, ids_TK = probs_TE.topk(SHAPE.top_k)
        probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
        if Site.ROUTES in self.layout.sites:
            self.layout.write_routes(self._forward, layer, ids_TK)
        fc1 = self._rounded(x_TH)
        self._write(Site.FC1, layer, fc1.codes_u8, fc1.scales_u8, fc1.global_scale)
        inputs_TKI = torch.stack(
            [
                torch.stack([_activation(w, int(e), x) for e in experts])
                for x, experts in zip(fc1.dequantize(), ids_TK, strict=True)
            ]
        )
        fc2 = self._rounded(inputs_TKI)
        self._write(Site.FC2, layer, fc2.codes_u8, fc2.scales_u8, fc2.global_scale)
        outputs_TKH = torch.stack(
            [
                torch.stack(
                    [_rounded_weight(w, f"{int(e)}.down") @ h for h, e in zip(hs, es, strict=True)]
                )
                for hs, es in zip(fc2.dequantize(), ids_TK, strict=True)
            ]
        )
        return (outputs_TKH * probs_TK.unsqueeze(-1)).sum(1)

    def _rounded(self, values: Tensor) -> Fp4Tensor:
        noisy = self._noisy(values)
        return quantize_nvfp4(noisy, token_scale(noisy))

    def _noisy(self, values: Tensor) -> Tensor:
        return values * (1 + self._noise * torch.randn(values.shape, generator=self._generator))

    def _write(self, site: Site, layer: int, *pieces: Tensor | None) -> None:
        if layer in self.layout.site_layers(site):
            rows = self._kv if site in (Site.K, Site.V) else self._forward
            self.layout.write_site(rows, site, layer, *pieces)

    def _records(self, tokens: Tensor, name: str, version: str) -> TrajectoryRecords:
        return make_records(tokens, name, self.layout, self._forward, self._kv, version)


def make_records(
    tokens: Tensor,
    name: str,
    layout: RecordLayout,
    forward: Tensor,
    kv: Tensor,
    version: str = "1",
) -> TrajectoryRecords:
    """What a bridge returns for a finished trajectory: every row but the last token's."""
    valid = torch.arange(len(tokens)) < len(tokens) - 1
    index = torch.where(valid, 0, -1).to(torch.int32)
    return TrajectoryRecords(
        trajectory=name,
        state=TrajectoryState.FINISHED,
        start=0,
        length=len(tokens),
        layout=layout,
        kv_scales={},
        tokens=tokens.to(torch.int32),
        forward=forward,
        forward_valid=valid,
        kv=kv,
        kv_valid=valid.clone(),
        weight_versions=(version,),
        weight_version_index=index,
        engine_ids=("engine",),
        engine_index=index.clone(),
        rows=torch.where(valid, torch.arange(len(tokens)), -1),
        revision=1,
    )


def _layer(weights: Weights, layer: int) -> Weights:
    """Return the weights of one layer by the rest of their name."""
    prefix = f"model.layers.{layer}."
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def _activation(w: Mapping[str, Tensor], expert: int, x_H: Tensor) -> Tensor:
    gate = _rounded_weight(w, f"{expert}.gate") @ x_H
    return torch.nn.functional.silu(gate) * (_rounded_weight(w, f"{expert}.up") @ x_H)


def _rounded_weight(w: Mapping[str, Tensor], name: str) -> Tensor:
    return quantize_weight(w[f"mlp.experts.{name}_proj.weight"]).dequantize()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + HF_CONFIG["rms_norm_eps"]) * weight


def _rotary(states: Tensor) -> Tensor:
    half = SHAPE.head_dim // 2
    frequency = HF_CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    angle = torch.arange(len(states)).unsqueeze(1) * frequency
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    first, second = states[..., :half], states[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
