"""The entry points of this package for patched SGLang.

Every line that the patch series adds to SGLang calls a function of this module, and nothing else
of ours. Heavy imports are inside the functions: SGLang executes `on_import` before its own first
import, and a server without `--trace-capture` must not pay for capture.

SGLang runs one scheduler a process, so the process has at most one `Capture`. All hooks from
`on_pool_ready` to `on_request` are called on the scheduler's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_trace import failure

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_trace.capture.capture import Capture

_capture: Capture | None = None


def on_import() -> None:
    """SGLang's package is being imported, in any of its processes: prepare a host without GPU."""
    from sglang_trace.preflight import cpu_host

    cpu_host.prepare()


def register_kv_cache(methods: dict[str, type]) -> None:
    """SGLang's table of KV cache methods exists: put our NVFP4 method into it where it has none."""
    from sglang_trace.hardware import is_hopper
    from sglang_trace.preflight import cpu_host

    if cpu_host.is_cpu_host() or is_hopper():
        from sglang_trace.attention import kv_cache

        kv_cache.register(methods)


def reads_fp4_kv_cache(*backends: str | None) -> bool:
    """SGLang asks whether its attention backends can read an FP4 KV cache: ours can, alone."""
    from sglang_trace.config import ATTENTION_BACKEND

    return set(backends) == {ATTENTION_BACKEND}


def register_quantization(methods: dict[str, type]) -> None:
    """SGLang's table of quantization methods exists: add `trace_nvfp4`."""
    from sglang_trace.config import QUANTIZATION
    from sglang_trace.quantization.config import TraceNvfp4Config

    methods[QUANTIZATION] = TraceNvfp4Config


def on_warm_up(request: dict[str, Any]) -> None:
    """The server is about to send itself a first request: name it, so that it is not recorded."""
    from sglang_trace.config import TraceConfig
    from sglang_trace.requests.trajectory_names import WARM_UP

    if TraceConfig.from_environment() is not None:
        request["rid"] = WARM_UP


def on_names(request: Any) -> None:
    """The tokenizer has normalized a client's request: refuse ids that no record can have.

    Raises:
        NameRefused: a ValueError, which SGLang answers with status 400.
    """
    if _captures():
        from sglang_trace.requests import trajectory_names

        trajectory_names.check_names(request)


def name_prefix(request: Any) -> str:
    """Return the id of the request that fills the prefix cache for n samples: no trajectory."""
    if _captures():
        from sglang_trace.requests import trajectory_names

        request.rid = trajectory_names.warm_up_name()
    return str(request.rid)


def name_sample(sample: Any, request: Any, number: int) -> str:
    """Return the id of output `number` of a request with n > 1, which is to be `sample`'s."""
    if _captures():
        from sglang_trace.requests import trajectory_names

        sample.rid = trajectory_names.name_of_sample(request, number)
    return str(sample.rid)


def on_batch(forward_batch: Any, requests: Any) -> None:
    """A forward batch is made of these requests, in the order of its rows."""
    if _capture is not None:
        forward_batch.trace_requests = list(requests)


def on_pool_ready(model_runner: Any) -> None:
    """A scheduler has loaded its model and allocated its KV pool: begin to capture."""
    global _capture
    from sglang_trace.config import TraceConfig

    if (config := TraceConfig.from_environment()) is None:
        return
    from sglang_trace.capture import startup

    with failure.reported():
        _capture = startup.begin(model_runner, config)


def on_forward(model_runner: Any, forward_batch: Any) -> None:
    """A forward pass has been launched."""
    if _capture is not None and not model_runner.is_draft_worker:
        with failure.reported():
            _capture.forward(forward_batch)


def on_finish(req: Any, req_to_token_pool: Any) -> None:
    """A request finished, or was aborted while it ran, and still holds its slots."""
    if _capture is not None and (slots := _slots(req, req_to_token_pool)) is not None:
        with failure.reported():
            _capture.finish(req, slots)


def on_retract(req: Any, req_to_token_pool: Any) -> None:
    """A running request is about to lose its slots, to be computed again or to be aborted."""
    if _capture is not None and (slots := _slots(req, req_to_token_pool)) is not None:
        with failure.reported():
            _capture.retract(req, slots)


def on_abort(req: Any) -> None:
    """A request ended without `on_finish`; its slots, if it had any, are gone."""
    if _capture is not None:
        with failure.reported():
            _capture.abort(req)


def on_request(scheduler: Any, request: Any, reply: Any) -> None:
    """A scheduler has handled a request: if it has new weights or a new version, note them."""
    if _capture is None:
        return
    from sglang_trace.weights import updates

    if not updates.changes_weights(request):
        return
    with failure.reported():
        version = updates.version_after(scheduler, request, reply)
        if updates.in_session(scheduler.weight_updater):
            _capture.weights_changing()
        else:
            _capture.weights_changed(version)


def _captures() -> bool:
    from sglang_trace.config import TraceConfig

    return TraceConfig.from_environment() is not None


def _slots(req: Any, req_to_token_pool: Any) -> Tensor | None:
    """Return the row of the slot table that a request holds, None if it holds none."""
    # Earlier releases keep the number of the row in the request itself.
    holder = req if hasattr(req, "req_pool_idx") else req.kv
    row = holder.req_pool_idx
    return None if row is None else req_to_token_pool.req_to_token[row]
