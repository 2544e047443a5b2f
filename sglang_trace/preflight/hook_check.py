"""Check that the SGLang that this process has imported calls our hooks and is as our code needs it.

Which function calls which hook is for `patches` to know, and what we use of SGLang is listed in
`upstream`. Here is only which process runs what: the others of SGLang's modules need not even be
imported there.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge.errors import TraceError
from patches.check.contract import Use, require_known_upstream
from patches.check.live import require_live_hooks
from patches.errors import PatchError
from sglang_trace.preflight import upstream_api

# Hooks that are called in the process that serves HTTP, and in every process.
SERVER_HOOKS = ("on_warm_up", "on_names", "name_prefix", "name_sample")
COMMON_HOOKS = ("on_import",)


class HookNotLive(TraceError):
    """The imported SGLang does not call one of our hooks."""


class UnknownUpstream(TraceError):
    """The imported SGLang has other signatures or attributes than our code uses."""


def check_options() -> None:
    """Check what reading and refusing SGLang's options needs.

    Raises:
        UnknownUpstream: naming every function and option that is different.
    """
    _check_uses(upstream_api.OPTIONS)


def check_server() -> None:
    """Check the hooks of the process that serves HTTP.

    Raises:
        HookNotLive: naming the first function that does not call its hook.
    """
    _check_hooks(lambda hook: hook in SERVER_HOOKS + COMMON_HOOKS)


def check_scheduler() -> None:
    """Check all other hooks, and what capture needs.

    Raises:
        HookNotLive: naming the first function that does not call its hook.
        UnknownUpstream: naming every function and attribute that is different.
    """
    _check_hooks(lambda hook: hook not in SERVER_HOOKS)
    _check_uses(upstream_api.SCHEDULER)


def _check_hooks(wanted: Callable[[str], bool]) -> None:
    try:
        require_live_hooks("sglang", wanted)
    except PatchError as error:
        raise HookNotLive(str(error)) from None


def _check_uses(uses: tuple[Use, ...]) -> None:
    try:
        require_known_upstream("sglang", uses)
    except PatchError as error:
        raise UnknownUpstream(str(error)) from None
