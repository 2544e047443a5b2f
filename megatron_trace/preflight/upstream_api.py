"""What our code takes for granted in Megatron-core: calls, overrides and attributes, by name.

Checked in every rank before training, and by `python -m patches doctor`. A use of a name that some
supported release lacks has a `since` or `before`, or the code asks before it uses it.
"""

from patches.check.attributes import Attributes
from patches.check.contract import Use
from patches.check.signatures import Call, Callback, Override

_MOE = "megatron.core.transformer.moe"
_TRANSFORMER = "megatron.core.transformer"
_PARALLEL = "megatron.core.tensor_parallel"
_GPT = "megatron.core.models.gpt"

_DISPATCH = (
    Call(f"{_PARALLEL}:all_to_all(group, rows, output_splits, input_splits)"),
    Call(
        f"{_PARALLEL}:gather_from_sequence_parallel_region"
        "(rows, group=group, output_split_sizes=splits)"
    ),
    Attributes(
        f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher",
        (
            *("routing_map", "ep_group", "input_splits", "output_splits", "num_local_experts"),
            *("tp_size", "ep_size", "tp_group", "output_splits_tp", "num_out_tokens"),
            *("num_global_tokens_per_local_expert", "sort_input_by_local_experts"),
        ),
    ),
    Attributes(
        f"{_MOE}.token_dispatcher:MoEAllGatherTokenDispatcher",
        ("hidden_shape", "tp_size", "ep_size", "tp_ep_group", "local_expert_indices", "local_map"),
    ),
)

_ROUTES = (
    Attributes(f"{_MOE}.router:TopKRouter", ("router_replay", "layer_number")),
    Callback(
        "megatron_trace.layers.router_replay:RecordedRoutes.get_replay_topk",
        f"{_MOE}.moe_utils:topk_routing_with_score_function",
        ("default_compute_topk",),
    ),
)

_MODULES = (
    Attributes(
        f"{_TRANSFORMER}.transformer_layer:TransformerLayer",
        ("config", "layer_number", "mlp", "self_attention", "tp_group"),
    ),
    # What is compared with the micro-batch, by the names under which it is passed.
    Call(
        f"{_GPT}.gpt_model:GPTModel.forward"
        "(self, input_ids=i, position_ids=p, attention_mask=m, decoder_input=d)"
    ),
    Attributes(f"{_GPT}.gpt_model:GPTModel", ("pre_process",)),
    Call(
        "megatron.core.models.common.embeddings.language_model_embedding:"
        "LanguageModelEmbedding.forward(self, input_ids=i, position_ids=p)"
    ),
    Attributes(
        "megatron.core.packed_seq_params:PackedSeqParams",
        ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    ),
    Attributes(
        "megatron.core.models.common.language_module.language_module:LanguageModule", ("forward",)
    ),
    Attributes(f"{_TRANSFORMER}.attention:Attention", ("config", "pg_collection", "forward")),
    Attributes(
        f"{_MOE}.moe_layer:MoELayer",
        (
            *("config", "router", "token_dispatcher", "experts", "attn_tp_group"),
            *("local_expert_indices", "num_local_experts"),
            *("preprocess", "routed_experts_compute"),
            *("shared_experts", "shared_expert_overlap"),
        ),
    ),
    Attributes(f"{_MOE}.experts:SequentialMLP", ("local_experts", "tp_group")),
    Attributes(f"{_MOE}.experts:TEGroupedMLP", ("linear_fc1", "linear_fc2", "tp_group", "forward")),
    Attributes(f"{_MOE}.shared_experts:SharedExpertMLP", ("pre_forward_comm",)),
    Attributes(f"{_TRANSFORMER}.multi_token_prediction:MultiTokenPredictionBlock", ("layers",)),
    Attributes(f"{_TRANSFORMER}.mlp:MLP", ("linear_fc1", "linear_fc2", "forward")),
    Attributes(f"{_PARALLEL}.layers:ColumnParallelLinear", ("weight", "forward")),
    Attributes(f"{_PARALLEL}.layers:RowParallelLinear", ("weight", "forward")),
    Attributes("megatron.core.process_groups_config:ProcessGroupCollection", ("tp",)),
    Callback(f"{_PARALLEL}.random:_get_cuda_rng_state", f"{_PARALLEL}.random:"),
    Callback(f"{_PARALLEL}.random:_set_cuda_rng_state", f"{_PARALLEL}.random:"),
    Call(f"{_PARALLEL}:vocab_parallel_cross_entropy(logits, targets)"),
)

_CONFIG = (
    Attributes(
        f"{_TRANSFORMER}.transformer_config:TransformerConfig",
        (
            # The sizes that records depend on.
            *("num_layers", "hidden_size", "moe_ffn_hidden_size", "num_moe_experts"),
            *("moe_router_topk", "num_query_groups", "kv_channels", "moe_layer_freq"),
            *("gated_linear_unit", "sequence_parallel"),
            # What is refused: an option under another name would no longer be.
            *("context_parallel_size", "multi_latent_attention", "experimental_attention_variant"),
            *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_latent_size"),
            *("cpu_offloading", "fine_grained_activation_offloading", "offload_modules"),
            "moe_shared_expert_overlap",
            *("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"),
            *("moe_router_padding_for_quantization", "moe_apply_probs_on_input"),
            *("moe_router_load_balancing_type", "moe_enable_routing_replay", "fp8", "fp4"),
            "cuda_graph_impl",
        ),
    ),
    Attributes(
        f"{_TRANSFORMER}.transformer_config:TransformerConfig",
        (
            *("use_transformer_engine_op_fuser", "moe_mlp_glu_interleave_size"),
            *("gtp_weight_remat_size", "expert_gtp_weight_remat_size"),
            *("overlap_dispatch_backward_with_experts_wgrad", "moe_single_grouped_weight"),
        ),
        since="0.17",
    ),
)

_CHECKPOINTS = (
    Call(
        f"{_GPT}.gpt_layer_specs:get_gpt_layer_local_spec"
        "(num_experts=n, qk_layernorm=True, normalization='RMSNorm')"
    ),
    Call(
        f"{_GPT}.gpt_model:GPTModel(config=c, transformer_layer_spec=s, vocab_size=v, "
        "max_sequence_length=n, pre_process=True, post_process=True, "
        "share_embeddings_and_output_weights=False, position_embedding_type='rope', "
        "rotary_base=r, vp_stage=None)"
    ),
    Attributes(
        f"{_GPT}.gpt_model:GPTModel",
        ("config", "decoder", "pg_collection", "share_embeddings_and_output_weights"),
    ),
    Attributes("megatron.core.process_groups_config:ProcessGroupCollection", ("expt_tp", "ep")),
    Call("megatron.core.parallel_state:is_pipeline_first_stage(vp_stage=v, ignore_virtual=False)"),
    Call("megatron.core.parallel_state:is_pipeline_last_stage(vp_stage=v, ignore_virtual=False)"),
    Call(f"{_TRANSFORMER}.transformer_block:get_num_layers_to_build(config, vp_stage)"),
    Call(
        f"{_TRANSFORMER}.transformer_block:TransformerBlockSubmodules(layer_specs=s, layer_norm=n)"
    ),
    Attributes(f"{_TRANSFORMER}.transformer_block:TransformerBlock", ("layers",)),
    Attributes(
        f"{_TRANSFORMER}.transformer_layer:TransformerLayerSubmodules",
        ("input_layernorm", "pre_mlp_layernorm", "self_attention"),
    ),
    Attributes(
        f"{_TRANSFORMER}.attention:SelfAttentionSubmodules",
        ("q_layernorm", "k_layernorm", "core_attention"),
    ),
    Override("megatron_trace.hf.qwen3_moe:RmsNorm", f"{_TRANSFORMER}.torch_norm:WrappedTorchNorm"),
    Override(
        "megatron_trace.hf.packed_attention:PackedDotProductAttention.forward",
        f"{_TRANSFORMER}.dot_product_attention:DotProductAttention.forward",
    ),
    Call(
        f"{_TRANSFORMER}.dot_product_attention:DotProductAttention.forward"
        "(self, query, key, value, attention_mask)"
    ),
    Attributes(f"{_TRANSFORMER}.dot_product_attention:DotProductAttention", ("softmax_scale",)),
    Attributes(
        "megatron.core.packed_seq_params:PackedSeqParams", ("cu_seqlens_q", "cu_seqlens_q_padded")
    ),
    Attributes(
        f"{_TRANSFORMER}.transformer_config:TransformerConfig",
        (
            *("num_attention_heads", "ffn_hidden_size", "moe_router_pre_softmax"),
            *("moe_token_dispatcher_type", "gradient_accumulation_fusion"),
            *("moe_router_dtype", "qk_layernorm", "normalization", "layernorm_epsilon"),
            *("activation_func", "add_bias_linear", "hidden_dropout", "attention_dropout"),
            *("params_dtype", "pipeline_dtype", "bf16", "use_cpu_initialization"),
            *("perform_initialization", "persist_layer_norm", "bias_activation_fusion"),
            *("bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"),
        ),
    ),
)

GUIDANCE: tuple[Use, ...] = _DISPATCH + _ROUTES + _MODULES + _CONFIG
CHECKPOINTS: tuple[Use, ...] = _CHECKPOINTS
USES = GUIDANCE + CHECKPOINTS
