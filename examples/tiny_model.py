"""Make a small Qwen3-MoE checkpoint with random weights, for the demo and the tests.

The shape is the real architecture in miniature (grouped-query attention with query and key norms,
top-2 of 8 experts in every layer), so everything that works on it exercises the code paths of a
large one. The tokenizer maps bytes to ids: no vocabulary file is needed and any text round-trips.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Spread of the random weights. The customary 0.02 leaves the logits of a model this small almost
# equal, so that every prompt continues alike; these values give logits a few units apart, like a
# trained model's, and log-probabilities that move visibly when an activation does. What a layer
# adds to the residual stream is kept small, as in a trained model: otherwise one flipped code word
# changes every later layer beyond recognition and nothing can be compared.
WEIGHT_RANGE = 0.1
RESIDUAL_RANGE = 0.02
EMBEDDING_RANGE = 1.0
LM_HEAD_RANGE = 0.3
NORM_RANGE = 0.1


def byte_vocabulary() -> dict[str, int]:
    """One id per byte, then the three special tokens: 259 entries."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END_OF_TEXT, TURN_START, TURN_END]
    return {piece: token_id for token_id, piece in enumerate(pieces)}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte tokenizer with chat markers."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_config() -> Qwen3MoeConfig:
    """Qwen3-MoE with 4 layers, hidden size 128, 8 experts of width 64, 2 KV heads of width 64."""
    vocabulary = byte_vocabulary()
    return Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        vocab_size=288,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=vocabulary[TURN_END],
        pad_token_id=vocabulary[END_OF_TEXT],
    )


def weight_shapes(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The checkpoint's tensors: names as Hugging Face writes them, [out, in] shapes."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries = config.num_attention_heads * head_dim
    keys = config.num_key_value_heads * head_dim
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.self_attn.q_norm.weight", (head_dim,)
        yield f"{layer}.self_attn.k_norm.weight", (head_dim,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate.weight", (config.num_experts, hidden)
        for expert in range(config.num_experts):
            prefix = f"{layer}.mlp.experts.{expert}"
            yield f"{prefix}.gate_proj.weight", (config.moe_intermediate_size, hidden)
            yield f"{prefix}.up_proj.weight", (config.moe_intermediate_size, hidden)
            yield f"{prefix}.down_proj.weight", (hidden, config.moe_intermediate_size)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config.vocab_size, hidden)


def write_config(config: Qwen3MoeConfig, path: Path) -> None:
    """Write config.json with the expert count under the name that published checkpoints use."""
    entries = config.to_diff_dict()
    entries["num_experts"] = entries.pop("num_local_experts", config.num_experts)
    (path / "config.json").write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One BF16 tensor: norms around 1, everything else around 0."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return (1 + NORM_RANGE * noise).to(torch.bfloat16)
    return (spread_of(name) * noise).to(torch.bfloat16)


def spread_of(name: str) -> float:
    """Standard deviation of a weight."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return RESIDUAL_RANGE
    ends = {"model.embed_tokens.weight": EMBEDDING_RANGE, "lm_head.weight": LM_HEAD_RANGE}
    return ends.get(name, WEIGHT_RANGE)


def make_checkpoint(directory: str | Path, seed: int = 0) -> Path:
    """Write config, BF16 safetensors and tokenizer to `directory` and return it.

    The same seed gives the same bytes.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = make_config()
    write_config(config, path)
    make_tokenizer().save_pretrained(path)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: random_weight(name, shape, generator) for name, shape in weight_shapes(config)}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def main() -> None:
    """Command line: `python examples/tiny_model.py DIRECTORY [--seed N]`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.directory, arguments.seed))


if __name__ == "__main__":
    main()
