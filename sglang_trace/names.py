"""Which requests are trajectories."""

from __future__ import annotations

from bridge.errors import TraceError
from bridge.naming import trajectory_of

# SGLang's health checks, and its warm-up request as named by our patch.
HEALTH_CHECK = "HEALTH_CHECK"
WARM_UP = "TRACE_WARM_UP"
# The bridge refuses longer names, and a refusal would end the server.
MOST_CHARACTERS = 1024


def client_trajectory(rid: str) -> str | None:
    """Return the trajectory that a request extends.

    None for the server's own requests, and for a client's that name none ("#2") or one that is too
    long: a client's mistake costs its records, not the server.
    """
    if rid.startswith((HEALTH_CHECK, WARM_UP)):
        return None
    try:
        trajectory = trajectory_of(rid)
    except TraceError:
        return None
    return trajectory if len(trajectory) <= MOST_CHARACTERS else None
