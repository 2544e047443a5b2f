"""Check that the imported Megatron-core calls every hook and is as our code needs it."""

from __future__ import annotations

from bridge.errors import TraceError
from megatron_trace.preflight import upstream_api
from patches.check import live
from patches.check.contract import require_known_upstream
from patches.errors import PatchError


class UnpatchedMegatron(TraceError):
    """The imported Megatron-core does not call a hook."""


class UnknownUpstream(TraceError):
    """The imported Megatron-core has other signatures or attributes than our code uses."""


def require_live_hooks() -> None:
    """Refuse a Megatron-core that would silently train without guidance.

    Raises:
        UnpatchedMegatron: naming the first function that does not call its hook.
        UnknownUpstream: naming every function and attribute that is different.
    """
    try:
        live.require_live_hooks("megatron-core")
    except PatchError as error:
        raise UnpatchedMegatron(str(error)) from None
    try:
        require_known_upstream("megatron-core", upstream_api.USES)
    except PatchError as error:
        raise UnknownUpstream(str(error)) from None
