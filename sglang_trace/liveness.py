"""Check that every hook is called by the SGLang that this process has imported.

`python -m patches verify` compares files; this looks at the code objects that run, so a stale
`.pyc`, a second installation or a plugin that replaced a method is found as well.
"""

from __future__ import annotations

import importlib
from types import CodeType

from bridge.errors import TraceError
from patches.live import code_of, names_in

_SRT = "sglang.srt"
_PROCESSOR = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# Hook -> the functions that call it, "module.qualified_name" below sglang.srt.
SCHEDULER_SITES: dict[str, tuple[str, ...]] = {
    "on_pool_ready": ("model_executor.model_runner.ModelRunner.init_routed_experts_capturer",),
    "on_forward": ("model_executor.model_runner.ModelRunner.forward",),
    "on_finish": (f"{_PROCESSOR}._maybe_collect_routed_experts",),
    "on_retract": ("managers.schedule_batch.release_req",),
    "on_abort": ("managers.scheduler.Scheduler.send_abort_output",),
    "on_weights": (
        "managers.scheduler.Scheduler.handle_update_weight_version",
        f"{_UPDATER}.record_weight_version_after_update",
        f"{_UPDATER}.end_weight_update",
    ),
}
SERVER_SITES: dict[str, tuple[str, ...]] = {
    "on_warm_up": ("entrypoints.http_server._execute_server_warmup",),
}


class HookNotLive(TraceError):
    """The imported SGLang does not call one of our hooks."""


def check_scheduler() -> None:
    """Check the hooks of a scheduler process."""
    check(SCHEDULER_SITES)


def check_server() -> None:
    """Check the hooks of the process that serves HTTP."""
    check(SERVER_SITES)


def check(sites: dict[str, tuple[str, ...]]) -> None:
    """Check that every function named by `sites` calls its hook.

    Raises:
        HookNotLive: naming the first function that does not.
    """
    for hook, callers in sites.items():
        for caller in callers:
            if hook not in names_in(_code_at(f"{_SRT}.{caller}")):
                raise HookNotLive(
                    f"{_SRT}.{caller} does not call {hook}: run python -m patches apply sglang "
                    "and disable SGLang plugins that replace this function."
                )


def _code_at(path: str) -> CodeType:
    """Import what `path` names and return its code: a function, or a method of a class."""
    parts = path.split(".")
    code = None
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        code = code_of(module, ".".join(parts[length:]))
        break
    if code is None:
        raise HookNotLive(
            f"{path} is not a function: install sglang 0.5.23 and run "
            "python -m patches apply sglang."
        )
    return code
