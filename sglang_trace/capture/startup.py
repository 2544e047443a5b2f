"""The beginning of capture in a scheduler process."""

from __future__ import annotations

import logging
from multiprocessing.util import Finalize
from typing import Any

from bridge.layout import ModelShape
from sglang_trace.capture import capture
from sglang_trace.capture.start_line import start_line
from sglang_trace.config import TraceConfig
from sglang_trace.preflight import hook_check, unsupported

logger = logging.getLogger(__name__)


def begin(model_runner: Any, config: TraceConfig) -> capture.Capture:
    """Check this process, connect to the bridge and send it the digests of the loaded weights.

    The first rank logs what is captured.

    Raises:
        TraceError: a hook is not called, the model cannot be captured or the bridge is missing.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.runtime_context import get_serving

    hook_check.check_scheduler()
    layout = config.layout(model_shape(model_runner.model_config.hf_config))
    unsupported.check_model(model_runner, layout)
    begun = capture.start(model_runner, config, layout, max_rows(model_runner))
    begun.weights_changed(get_serving().weight_version)
    # Runs when SGLang lets the scheduler end; a killed one loses what is not acknowledged.
    Finalize(None, begun.close, exitpriority=100)
    if get_tp_group().rank_in_group == 0:
        logger.info(start_line(layout, config))
    return begun


def model_shape(hf_config: Any) -> ModelShape:
    """Return the sizes of a loaded model.

    Transformers renames the expert count of some models, so the published name is put back.
    """
    entries = hf_config.get_text_config().to_dict()
    entries["num_experts"] = hf_config.get_text_config().num_experts
    return ModelShape.from_hf_config(entries)


def max_rows(model_runner: Any) -> int:
    """Return the most tokens that one forward pass computes.

    A chunk of prefill, with --enable-mixed-chunk together with a decode step of every running
    request, which a decode graph's padding never exceeds. Without chunking one prompt may fill the
    whole pool.
    """
    from sglang.srt.runtime_context import get_schedule

    chunk = get_schedule().chunked_prefill_size
    if chunk is None or chunk <= 0:
        return int(model_runner.max_total_num_tokens)
    return int(chunk + model_runner.max_running_requests)
