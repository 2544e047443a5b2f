"""One engine that decodes from a KV pool which was filled, not prefilled.

SGLang's own model runner, pools, allocator, batches, decode graphs and sampler, in this process and
without its scheduler: no HTTP, no queue, no detokenizer, no processing of results on the host,
which overlap scheduling hides behind a step of this length. The host launches a step without
waiting for the one before, as that scheduler does. The hooks of capture are called by the model
runner itself, and at the end of the requests by this module as the scheduler would.

Every slot of the pool gets random code words or values once. A request of context C is then one
whose C - 1 page tokens are found in the prefix cache: it gets slots of its own from the allocator,
interleaved page by page with those of the other requests, as they come to lie when a batch
generates its tokens together. Every step samples, and the next one is fed random tokens: what a
model of random weights samples soon repeats, and would go to a few experts only.

Run as a process of its own: the memory of one configuration is all of it given back.
"""

from __future__ import annotations

import json
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from benchmarks.engine import step_parts
from bridge.transport.ports import held_port

ROW = "row "
WARM_UP = 4
PROFILED = 3
FILL_ROWS = 1 << 18
# Block scales of 2^-2 to 2^0: values of a few units, as keys and values have.
SCALE_CODES = 0x28, 0x38
BUFFERS = "k_buffer", "v_buffer"
SCALE_BUFFERS = "k_scale_buffer", "v_scale_buffer"


def pool_tensors(pool: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a KV pool, layer by layer, by the name of their list."""
    for name in (*BUFFERS, *SCALE_BUFFERS):
        for tensor in getattr(pool, name, None) or ():
            yield name, tensor


def fill(pool: Any) -> None:
    """Give every slot of every layer a random content that is finite."""
    for name, tensor in pool_tensors(pool):
        for rows in tensor.split(FILL_ROWS):
            if name in SCALE_BUFFERS:
                rows.view(torch.uint8).random_(*SCALE_CODES)
            elif rows.dtype == torch.uint8 and pool.dtype == torch.float8_e4m3fn:
                noise = torch.randn(rows.shape, device=rows.device)
                rows.copy_(noise.to(torch.float8_e4m3fn).view(torch.uint8))
            elif rows.dtype == torch.uint8:
                rows.random_(0, 256)
            else:
                rows.copy_(torch.randn(rows.shape, device=rows.device))


def interleaved(slots: Tensor, batch: int, page_size: int) -> Tensor:
    """[batch, tokens a request] of the slots [batch * tokens]: page p of request r is page
    p * batch + r of what the allocator gave."""
    pages = slots.view(-1, batch, page_size)
    return pages.transpose(0, 1).reshape(batch, -1)


def most_requests(pool_tokens: int, context: int, steps: int, page_size: int) -> int:
    """How many requests of this context fit, with room for the tokens they get."""
    pages = -(-(context + steps) // page_size)
    return pool_tokens // (pages * page_size)


def unique_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the storages, each once: parameters may share one."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class Clock:
    """Times of steps: GPU events where there is a GPU."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self._marks: list[Any] = []
        self._began = time.perf_counter()

    def mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def milliseconds(self) -> list[float]:
        """Between the marks, one less than there are."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._on_gpu:
            return [1000 * (end - start) for start, end in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def wall_ms(self) -> float:
        """Since it was made."""
        return 1000 * (time.perf_counter() - self._began)


class Engine:
    """A loaded model and its KV pool. `server_args` are the options of SGLang's server."""

    def __init__(self, server_args: Any, contexts: list[int], steps: int) -> None:
        self.steps = steps
        self.runner = load(server_args)
        pool_tokens = self.runner.max_total_num_tokens
        self.batches = {
            context: min(
                most_requests(pool_tokens, context, self.tokens_to_come, self.runner.page_size),
                self.runner.max_running_requests,
            )
            for context in contexts
        }
        print("batches:", self.batches, flush=True)
        finish_loading(self.runner, sorted({n for n in self.batches.values() if n}))
        fill(self.runner.token_to_kv_pool)
        self.device: str = self.runner.device

    @property
    def tokens_to_come(self) -> int:
        """Tokens that a request gets while it is measured."""
        return WARM_UP + 1 + self.steps + 1 + PROFILED

    def sizes(self) -> dict[str, Any]:
        """What the memory went to."""
        model, pool = self.runner.model, self.runner.token_to_kv_pool
        kv_bytes = sum(tensor.nbytes for _name, tensor in pool_tensors(pool))
        first = next(tensor for _name, tensor in pool_tensors(pool))
        return {
            "weight_bytes": unique_bytes(iter([*model.parameters(), *model.buffers()])),
            "kv_bytes": kv_bytes,
            "kv_bytes_per_token": round(kv_bytes / len(first)),
            "pool_tokens": self.runner.max_total_num_tokens,
            "page_size": self.runner.page_size,
            "attention": self.runner.server_args.attention_backend,
        }

    def measure(self, context: int) -> dict[str, Any]:
        """Decode a batch of as many requests of this context as fit; returns what was measured."""
        size = self.batches[context]
        if size == 0:
            return {"failed": "not one request of this context fits into the pool"}
        batch = Batch(self.runner, size, context, self.tokens_to_come)
        for _ in range(WARM_UP):
            batch.step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        clock = Clock(self.device)
        clock.mark()
        for _ in range(self.steps):
            batch.step()
            clock.mark()
        times = clock.milliseconds()
        wall_ms = clock.wall_ms()
        ms = statistics.median(times)
        row = {
            "batch": size,
            "ms_per_step": round(ms, 4),
            "slowest_ms": round(max(times), 4),
            "wall_ms_per_step": round(wall_ms / self.steps, 4),
            "steps": self.steps,
            "tokens_per_s": round(1000 * size / ms, 2),
            "decode_graph": batch.used_graph,
        }
        if self.device == "cuda":
            row |= parts_of(batch, ms)
        batch.finish()
        return row | {"steps_recorded": batch.steps}


def parts_of(batch: Batch, ms: float) -> dict[str, Any]:
    """The step of `ms` milliseconds by part; a profiler that fails costs only that."""
    try:
        kernels = step_parts.profile(batch.step, PROFILED)
    except RuntimeError as error:
        return {"split_failed": str(error)[:300]}
    parts = step_parts.split(kernels, PROFILED)
    parts["idle"] = round(ms - sum(parts.values()), 4)
    return {"split_ms": parts, "largest": step_parts.largest(kernels, PROFILED)}


def with_options(arguments: list[str], work: Callable[[Any], None]) -> None:
    """Let our server process read and check its options, and do `work` where it would serve."""
    from sglang_trace import hooks, server_process

    hooks.on_import()
    from sglang import launch_server

    launch_server.run_server = work
    server_process.main(arguments)


def load(server_args: Any) -> Any:
    """A model runner with weights and KV pool, without attention backend and graphs."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import PortArgs
    from sglang.srt.utils import configure_logger

    _set_envs_and_config(server_args)
    configure_logger(server_args)
    initialize_moe_config(server_args)
    initialize_fp8_gemm_config(server_args)
    initialize_fp4_gemm_config(server_args)
    one_rank = {
        f"{name}_{what}": number
        for name in ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "moe_ep")
        for what, number in (("rank", 0), ("size", 1))
    }
    sizes = {"dp_size": 1, "moe_dp_size": 1, "dcp_size": 1}
    runner = ModelRunner(
        model_config=ModelConfig.from_server_args(server_args),
        mem_fraction_static=server_args.mem_fraction_static,
        gpu_id=0,
        ps=ParallelState(**one_rank, **sizes, dp_rank=None, moe_dp_rank=None, gpu_id=0),
        nccl_port=PortArgs.init_new(server_args).nccl_port,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    return runner


def finish_loading(runner: Any, sizes: list[int]) -> None:
    """Attention backend and decode graphs, of these batch sizes only."""
    if runner.device == "cuda" and sizes:
        runner.server_args.cuda_graph_config.decode.bs = sizes
        runner.server_args.cuda_graph_config.decode.max_bs = max(sizes)
    runner.init_attention_backends()
    runner.init_cuda_graphs()


@dataclass(frozen=True)
class NoPrefixCache:
    """What an allocation needs of SGLang's prefix cache when there is nothing to evict."""

    page_size: int
    device: str
    token_to_kv_pool_allocator: Any

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def is_chunk_cache(self) -> bool:
        return False

    def is_tree_cache(self) -> bool:
        return True

    def evict(self, _params: Any) -> None:
        """Nothing."""


class Batch:
    """`size` requests in decode, each with `context` tokens in the pool, for at most `steps`."""

    def __init__(self, runner: Any, size: int, context: int, steps: int) -> None:
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self._runner = runner
        self.used_graph = False
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()
        page_size = runner.page_size
        if context % page_size:
            raise ValueError(f"A context of {context} is no whole number of pages of {page_size}.")
        slots = runner.token_to_kv_pool_allocator.alloc(size * (context - page_size))
        prefixes = interleaved(slots, size, page_size)
        vocabulary = runner.model_config.vocab_size
        tokens = torch.randint(0, vocabulary, (size, context), dtype=torch.int64)
        self.requests = [
            request(f"decode-{context}/{number}", ids.numpy(), prefix)
            for number, (ids, prefix) in enumerate(zip(tokens, prefixes, strict=True))
        ]
        cache = NoPrefixCache(page_size, runner.device, runner.token_to_kv_pool_allocator)
        self._batch = ScheduleBatch.init_new(
            reqs=self.requests,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=cache,
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        # Slots, lengths and sampling parameters; the pass itself is left out.
        self._batch.prepare_for_extend()
        self._batch.prefill_input_ids_cpu = None
        self._fed = torch.randint(0, vocabulary, (steps, size), device=runner.device)
        self.sampled: Tensor | None = None
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Launch one decode step."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        self._batch.input_ids = self._fed[self.steps]
        self._batch.prepare_for_decode()
        forward = ForwardBatch.init_new(
            self._batch, self._runner, return_hidden_states_before_norm=False
        )
        output = self._runner.forward(forward)
        self.used_graph = bool(output.can_run_graph)
        self.sampled = self._runner.sample(output.logits_output, forward)
        self.steps += 1

    def finish(self) -> None:
        """End the requests as the scheduler does, so that capture sends what it has of them."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        from sglang_trace import hooks

        assert self.sampled is not None
        # The last token sampled is consumed by no step.
        replies = torch.cat((self._fed[: self.steps], self.sampled[None])).T.tolist()
        for req, tokens in zip(self.requests, replies, strict=True):
            req.output_ids.extend(tokens)
            req.finished_reason = FINISH_LENGTH(len(tokens))
            hooks.on_finish(req, self._runner.req_to_token_pool)


def request(rid: str, tokens: Any, prefix: Tensor) -> Any:
    """A request whose first tokens are cached in these slots."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    parameters = SamplingParams(temperature=0.0, max_new_tokens=1 << 20, ignore_eos=True)
    parameters.normalize(None)
    req = Req(
        rid=rid,
        origin_input_text="",
        origin_input_ids=array("q", tokens.tobytes()),
        sampling_params=parameters,
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.prefix_indices = prefix
    req.set_extend_range(len(prefix), len(req.origin_input_ids))
    return req


def main(
    model: Annotated[Path, typer.Option(help="Folder with the model's config.json.")],
    contexts: Annotated[str, typer.Option(help="Tokens a request has, comma-separated.")],
    steps: Annotated[int, typer.Option(help="Measured steps.")],
    server: Annotated[str, typer.Option(help="JSON list of SGLang's arguments.")],
) -> None:
    """Prints one line of JSON, after `row `, for every context."""
    wanted = [int(context) for context in contexts.split(",")]
    rate = None
    if torch.cuda.is_available():
        from benchmarks.gpu_timing import copy_rate

        rate = round(copy_rate())
        torch.cuda.empty_cache()

    def work(server_args: Any) -> None:
        began = time.perf_counter()
        engine = Engine(server_args, wanted, steps)
        sizes = engine.sizes() | {"load_s": round(time.perf_counter() - began, 1)}
        for context in wanted:
            row = {"context": context} | sizes | engine.measure(context)
            if rate is not None:
                row["copy_gb_per_s"] = rate
            print(ROW + json.dumps(row), flush=True)

    # The port is not used; that it is free is checked all the same.
    with_options(
        ["--model-path", str(model), "--port", str(held_port()), *json.loads(server)], work
    )


if __name__ == "__main__":
    # Plain tracebacks: their last line is the reason that `decode_128k` reports.
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
