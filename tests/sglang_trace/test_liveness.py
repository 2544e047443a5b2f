import pytest

from sglang_trace import hooks, liveness


def test_the_installed_sglang_calls_every_hook() -> None:
    liveness.check_scheduler()
    liveness.check_server()


def test_every_hook_of_a_running_server_is_checked() -> None:
    checked = {*liveness.SCHEDULER_SITES, *liveness.SERVER_SITES}
    # Without these three the server does not start on this host, or knows no trace_nvfp4.
    needed_to_start = {"on_import", "register_kv_cache", "register_quantization"}
    offered = {name for name in vars(hooks) if name.startswith(("on_", "register_"))}
    assert checked | needed_to_start == offered


def test_a_function_that_lost_its_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "forward", lambda self, batch: batch)
    with pytest.raises(
        liveness.HookNotLive, match=r"ModelRunner\.forward does not call on_forward"
    ):
        liveness.check_scheduler()


def test_a_function_that_is_gone_is_named() -> None:
    with pytest.raises(liveness.HookNotLive, match="nowhere is not a function"):
        liveness.check({"on_forward": ("model_executor.model_runner.nowhere",)})
