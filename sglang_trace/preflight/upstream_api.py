"""What our code takes for granted in SGLang: calls, overrides and attributes, by name.

Checked before SGLang's options are read, in every scheduler before it captures, and by `python -m
patches doctor`. A use of a name that some supported release lacks has a `since` or `before`.
"""

from __future__ import annotations

from patches.check.attributes import Attributes
from patches.check.contract import Use
from patches.check.signatures import Call, Callback, Override

_SRT = "sglang.srt"
_QUANTIZATION = f"{_SRT}.layers.quantization"
_BASE = f"{_QUANTIZATION}.base_config"
_KV_CACHE = f"{_QUANTIZATION}.fp4_kv_cache_quant_method"
_MOE = f"{_SRT}.layers.moe"
_ATTENTION = f"{_SRT}.layers.attention"
_BASE_ATTENTION = f"{_ATTENTION}.base_attn_backend:AttentionBackend"
_MANAGERS = f"{_SRT}.managers"
_ARGUMENTS = f"{_SRT}.server_args"

_OUR_METHOD = "sglang_trace.quantization.moe_method:TraceNvfp4MoEMethod"
_OUR_LOADER = "sglang_trace.quantization.expert_weights:Experts.weight_loader"
_OUR_CONFIG = "sglang_trace.quantization.config:TraceNvfp4Config"
_OUR_KV_CACHE = "sglang_trace.attention.kv_cache:TorchNvfp4KVCacheMethod"
_OUR_GPU_KV_CACHE = "sglang_trace.attention.kv_cache:TritonNvfp4KVCacheMethod"
_OUR_ATTENTION = "sglang_trace.attention.backend:TraceFp4Backend"

# The process that serves HTTP and reads the options.
OPTIONS: tuple[Use, ...] = (
    Call("sglang.launch_server:run_server(server_args)"),
    Call(f"{_SRT}.plugins:load_plugins()"),
    Call(f"{_SRT}.utils:kill_process_tree(pid, include_parent=False)"),
    Call(f"{_ARGUMENTS}:add_quantization_method_choices(names)"),
    Attributes(f"{_ARGUMENTS}:", ("QUANTIZATION_CHOICES", "ATTENTION_BACKEND_CHOICES")),
    Call(f"{_ARGUMENTS}:add_attention_backend_choices(names)"),
    Call(f"{_ARGUMENTS}:prepare_server_args(arguments)"),
    Call(f"{_ARGUMENTS}:ServerArgs.add_cli_args(parser)"),
    Callback(f"{_ARGUMENTS}:ServerArgs.add_cli_args", f"{_ARGUMENTS}:prepare_server_args"),
    Call(f"{_SRT}.arg_groups.overrides:resolved_view(server_args)"),
    Call(f"{_ARGUMENTS}:ServerArgs.resolve_once(self)", since="0.5.20"),
    Call(
        f"{_SRT}.arg_groups.resolution_hooks:register_resolution_hook(step)",
        since="0.5.20",
    ),
    Attributes(
        f"{_SRT}.arg_groups.kv_cache_hook:",
        ("handle_kv4_compatibility", "handle_nvfp4_prefill_kv_dequant_dtype"),
        since="0.5.21",
    ),
    Attributes(
        f"{_ARGUMENTS}:ServerArgs",
        (
            # What we choose where the user does not.
            *("host", "port", "device", "attention_backend", "quantization", "kv_cache_dtype"),
            # What is refused: an option under another name would no longer be.
            *("tp_size", "ep_size", "dp_size", "pp_size", "attn_cp_size", "dcp_size"),
            *("moe_dp_size", "enable_attn_tp_input_scattered"),
            *("speculative_algorithm", "enable_hierarchical_cache", "enable_lmcache"),
            *("enable_flexkv", "enable_hisparse", "enable_unified_memory"),
            *("enable_streaming_session", "disaggregation_mode"),
            *("enable_two_batch_overlap", "enable_pdmux", "dllm_algorithm", "cuda_graph_config"),
            *("enable_eplb", "ep_num_redundant_experts", "enable_lora", "lora_paths"),
            *("warmups", "enable_mis", "model_path", "load_format", "revision"),
            *("is_embedding", "use_ray", "kt_weight_path", "moe_runner_backend"),
            *("cuda_graph_backend_prefill", "enable_torch_compile"),
            *("prefill_attention_backend", "decode_attention_backend"),
        ),
    ),
    Attributes(
        f"{_ARGUMENTS}:ServerArgs",
        ("enable_kv_cache_sharding", "enable_paged_experts"),
        since="0.5.23",
    ),
)

_EXPERTS = (
    Call(f"{_MOE}.token_dispatcher:StandardCombineInput(hidden_states=y)"),
    Call(f"{_MOE}.topk:StandardTopKOutput(topk_weights=w, topk_ids=i, router_logits=l)"),
    Attributes(f"{_MOE}.token_dispatcher:StandardDispatchOutput", ("hidden_states", "topk_output")),
    Call(f"{_SRT}.utils:set_weight_attrs(parameter, attributes)"),
    Attributes(
        f"{_MOE}.moe_runner.base:MoeRunnerConfig",
        (
            *("activation", "is_gated", "apply_router_weight_on_input", "gemm1_alpha"),
            *("gemm1_clamp_limit", "swiglu_limit", "num_fused_shared_experts"),
            *("routed_scaling_factor",),
        ),
    ),
    Attributes(f"{_MOE}.moe_runner.base:MoeRunnerConfig", ("gemm1_beta",), since="0.5.20"),
    Attributes(f"{_MOE}.moe_runner.base:MoeRunnerConfig", ("silu_mul_keep_fp32",), since="0.5.21"),
    Attributes(
        f"{_MOE}.fused_moe_triton.layer:FusedMoE",
        ("layer_id", "quant_method", "moe_tp_rank", "moe_tp_size"),
    ),
    Call(f"{_SRT}.distributed.parallel_state:get_tp_group()"),
    Attributes(
        f"{_SRT}.distributed.parallel_state:GroupCoordinator",
        ("cpu_group", "device_group", "rank_in_group", "world_size"),
    ),
    Override(_OUR_LOADER, f"{_MOE}.fused_moe_triton.layer:FusedMoE.weight_loader"),
    Call(f"{_SRT}.runtime_context:get_model()"),
    Attributes(f"{_ARGUMENTS}:ServerArgs", ("load_format",)),
    Override(f"{_OUR_METHOD}.create_weights", f"{_BASE}:FusedMoEMethodBase.create_weights"),
    Callback(
        f"{_OUR_METHOD}.create_weights",
        f"{_MOE}.fused_moe_triton.layer:FusedMoE.__init__",
        ("with_bias",),
    ),
    Override(f"{_OUR_METHOD}.create_moe_runner", f"{_BASE}:FusedMoEMethodBase.create_moe_runner"),
    Override(f"{_OUR_METHOD}.apply", f"{_BASE}:FusedMoEMethodBase.apply"),
    Override(
        f"{_OUR_METHOD}.process_weights_after_loading",
        f"{_BASE}:FusedMoEMethodBase.process_weights_after_loading",
    ),
)

_QUANTIZATION_METHOD = (
    *(
        Override(f"{_OUR_CONFIG}.{name}", f"{_BASE}:QuantizationConfig.{name}")
        for name in (
            *("get_name", "get_supported_act_dtypes", "get_min_capability"),
            *("get_config_filenames", "from_config", "get_quant_method", "get_scaled_act_names"),
        )
    ),
    Attributes(f"{_BASE}:", ("QuantizeMethodBase",)),
    Attributes(f"{_SRT}.layers.linear:", ("LinearBase",)),
    Call(f"{_QUANTIZATION}.unquant:UnquantizedLinearMethod()"),
)

_KV_CACHE_METHOD = (
    Override(_OUR_KV_CACHE, f"{_KV_CACHE}:NVFP4KVCacheMethod"),
    Call(f"{_KV_CACHE}:NVFP4KVCacheMethod(num_layers, device)"),
    *(
        Override(f"{_OUR_KV_CACHE}.{name}", f"{_KV_CACHE}:NVFP4KVCacheMethod.{name}")
        for name in (
            *("attention_accesses", "create_buffers", "quantize_and_store"),
            "dequantize_kv_tensor",
        )
    ),
    Override(
        f"{_OUR_GPU_KV_CACHE}.quantize_and_store",
        f"{_KV_CACHE}:NVFP4KVCacheMethod.quantize_and_store",
    ),
    Override(
        f"{_OUR_KV_CACHE}.needs_linear_scale_buffer",
        f"{_KV_CACHE}:NVFP4KVCacheMethod.needs_linear_scale_buffer",
        since="0.5.21",
    ),
    Attributes(
        f"{_KV_CACHE}:NVFP4KVCacheMethod",
        ("name", "k_scales_gpu", "v_scales_gpu", "k_scales_float", "v_scales_float"),
    ),
    Attributes(f"{_KV_CACHE}:KVCacheAttentionAccessKind", ("PLAIN", "NATIVE_FP4")),
    Attributes(f"{_KV_CACHE}:", ("KVCacheAttentionPhase",)),
    Call(f"{_KV_CACHE}:KVCacheBackendMatcher(exact=names)"),
    Call(
        f"{_KV_CACHE}:KVCacheAttentionAccess(phase, kind, matcher, storage_dtype=a, "
        "attention_kv_dtype=b, scale_recipe=c)"
    ),
    Call(f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool.get_raw_kv_buffer(self, layer)"),
    Attributes(
        f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool", ("size", "page_size", "quant_method")
    ),
)

_ATTENTION_BACKEND = (
    Call(f"{_BASE_ATTENTION}()"),
    *(
        Override(f"{_OUR_ATTENTION}.{name}", f"{_BASE_ATTENTION}.{name}")
        for name in (
            *("init_forward_metadata", "init_forward_metadata_out_graph"),
            *("init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value"),
            *("forward_decode", "forward_extend"),
        )
    ),
    Attributes(_BASE_ATTENTION, ("needs_cpu_seq_lens",)),
    Call(f"{_ATTENTION}.attention_registry:register_attention_backend(name)"),
    Attributes(
        f"{_SRT}.layers.radix_attention:RadixAttention",
        (
            *("tp_q_head_num", "tp_k_head_num", "head_dim", "qk_head_dim", "v_head_dim"),
            *("scaling", "layer_id", "logit_cap", "sliding_window_size", "is_cross_attention"),
            *("attn_type", "pos_encoding_mode", "xai_temperature_len"),
        ),
    ),
    Attributes(f"{_SRT}.layers.radix_attention:AttentionType", ("DECODER",)),
    Call(f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer(self, layer, slots, k, v)"),
    Call(f"{_KV_CACHE}:NVFP4KVCacheMethod.get_bmm_scales(self, layer)"),
    Attributes(f"{_SRT}.mem_cache.memory_pool:ReqToTokenPool", ("size",)),
    Attributes(
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch",
        ("batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens_cpu"),
    ),
    Attributes(
        f"{_SRT}.configs.model_config:ModelConfig", ("is_encoder_decoder", "has_attention_sinks")
    ),
    Attributes(f"{_SRT}.model_executor.model_runner:ModelRunner", ("dtype", "req_to_token_pool")),
)

_REQUESTS = (
    Attributes(
        f"{_MANAGERS}.io_struct:GenerateReqInput", ("rid", "batch_size", "parallel_sample_num")
    ),
    Attributes(
        f"{_MANAGERS}.schedule_batch:Req",
        (
            *("rid", "origin_input_ids", "output_ids", "output_ids_through_stop"),
            *("finished_reason", "to_finish", "retraction_count"),
            *("input_embeds", "positional_embed_overrides", "multimodal_inputs"),
        ),
    ),
    Attributes(f"{_MANAGERS}.schedule_batch:Req", ("beam_group",), since="0.5.20"),
    Attributes(f"{_MANAGERS}.schedule_batch:Req", ("kv",), since="0.5.20"),
    Attributes(f"{_MANAGERS}.schedule_batch:ReqKvInfo", ("req_pool_idx",), since="0.5.20"),
    Attributes(f"{_MANAGERS}.schedule_batch:Req", ("req_pool_idx",), before="0.5.20"),
    Attributes(f"{_SRT}.mem_cache.memory_pool:ReqToTokenPool", ("req_to_token",)),
    Call(f"{_MANAGERS}.schedule_batch:BaseFinishReason.to_json(self)"),
    Attributes(f"{_MANAGERS}.schedule_batch:FINISH_ABORT", ("status_code",)),
)

_FORWARDS = (
    Attributes(
        f"{_SRT}.model_executor.forward_batch_info:ForwardBatch",
        (
            *("forward_mode", "out_cache_loc", "seq_lens_cpu"),
            *("extend_prefix_lens_cpu", "extend_seq_lens_cpu"),
        ),
    ),
    *(
        Call(f"{_SRT}.model_executor.forward_batch_info:ForwardMode.{question}(self)")
        for question in ("is_idle", "is_decode", "is_extend_without_speculative")
    ),
    Attributes(
        f"{_SRT}.model_executor.model_runner:ModelRunner",
        (
            *("model", "model_config", "token_to_kv_pool", "device", "is_draft_worker"),
            *("max_total_num_tokens", "max_running_requests", "is_hybrid_swa"),
        ),
    ),
    Attributes(f"{_SRT}.configs.model_config:ModelConfig", ("hf_config", "model_path")),
    Call(f"{_SRT}.runtime_context:get_serving()"),
    Call(f"{_SRT}.runtime_context:get_schedule()"),
    Attributes(f"{_ARGUMENTS}:ServerArgs", ("weight_version", "chunked_prefill_size")),
)

_UPDATER = f"{_MANAGERS}.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_UPDATES = (
    Attributes(f"{_MANAGERS}.scheduler:Scheduler", ("weight_updater",)),
    Attributes(
        f"{_MANAGERS}.scheduler:Scheduler", ("record_weight_version_change",), since="0.5.20"
    ),
    Attributes(_UPDATER, ("_session",), since="0.5.21"),
    Attributes(
        f"{_MANAGERS}.io_struct:",
        (
            *("UpdateWeightFromDiskReqInput", "UpdateWeightsFromTensorReqInput"),
            *("UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromIPCReqInput"),
            *("UpdateWeightVersionReqInput",),
        ),
    ),
    Attributes(f"{_MANAGERS}.io_struct:", ("EndWeightUpdateReqInput",), since="0.5.21"),
    # Earlier releases tell the scheduler only with the update what its weights are called.
    *(
        Attributes(f"{_MANAGERS}.io_struct:{update}{kind}", (attribute,), before="0.5.21")
        for update in (
            *("UpdateWeightFromDisk", "UpdateWeightsFromTensor"),
            *("UpdateWeightsFromDistributed", "UpdateWeightsFromIPC"),
        )
        for kind, attribute in (("ReqInput", "weight_version"), ("ReqOutput", "success"))
    ),
)

SCHEDULER: tuple[Use, ...] = (
    _EXPERTS
    + _QUANTIZATION_METHOD
    + _KV_CACHE_METHOD
    + _ATTENTION_BACKEND
    + _REQUESTS
    + _FORWARDS
    + _UPDATES
)
USES = OPTIONS + SCHEDULER
