"""One guided backward of a recorded trajectory, as printed in the README.

Start it with `python -m megatron_trace.launch examples/first_job.py`.
"""

import torch
from megatron.core import parallel_state, tensor_parallel

from bridge import TraceClient
from megatron_trace import GuidedMicroBatch, enable_fp4, fetch_records, guide, token_logprobs
from megatron_trace.hf import build_model, load_hf, transformer_config
from megatron_trace.hf.qwen3_moe import read_hf_config

checkpoint, bridge, trajectory = "out/tiny", "tcp://127.0.0.1:7707", "traj-7"

torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)

hf = read_hf_config(checkpoint)
model = build_model(hf, transformer_config(hf, params_dtype=torch.bfloat16))
load_hf(model, checkpoint)
enable_fp4(model)  # experts, keys and values in FP4

with TraceClient(bridge) as client:
    records = fetch_records(client, [trajectory], model=model)
tokens = records[0].tokens.long()[None]  # [1, s]
batch = GuidedMicroBatch.from_records(records, tokens, weight_version="default")

length = tokens.shape[1]
positions = torch.arange(length)[None]
future = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
with guide(batch):  # every rounding follows the rollout's
    logits = model(tokens, positions, future)
log_probs = token_logprobs(logits, tokens.roll(-1, 1))[:, :-1]
(-log_probs.mean()).backward()

total = batch.report().total()
print(f"{length} tokens, {total.guided} values guided, {total.missing} missing")
