"""Which requests are trajectories, and what the requests that SGLang derives from one are called.

A request id is the trajectory's name, with or without a turn behind '#'
(`sglang_trace.requests.naming`). What SGLang derives from the id of one request:

    several prompts, one id     NAME_0, NAME_1, ... by SGLang itself
    n samples of a prompt       NAME/0, NAME/1, ... with the prompt's name

A turn stays last: the samples of "t#2" are "t/0#2" and "t/1#2".
"""

from __future__ import annotations

import uuid
from typing import Any

from bridge.errors import TraceError
from sglang_trace.requests.naming import SUFFIX_MARK, trajectory_of

# SGLang's health checks, and its own requests as named by our patches.
HEALTH_CHECK = "HEALTH_CHECK"
WARM_UP = "TRACE_WARM_UP"
# The bridge refuses longer names, and a refusal would end the server.
MAX_CHARACTERS = 1024


class NameRefused(TraceError, ValueError):
    """A request id under which nothing can be recorded; SGLang answers with status 400."""


def is_own(rid: str) -> bool:
    """Whether the server itself sent the request."""
    return rid.startswith((HEALTH_CHECK, WARM_UP))


def client_trajectory(rid: str) -> str | None:
    """Return the trajectory that a request extends.

    None for the server's own requests, and for a client's that name none ("#2") or one that is too
    long: a client's mistake costs its records, not the server.
    """
    if is_own(rid):
        return None
    try:
        return checked_trajectory(rid)
    except TraceError:
        return None


def checked_trajectory(rid: str) -> str:
    """Return the trajectory that a client's request extends.

    Raises:
        TraceError: it names none, one that is too long, or one that is no text.
    """
    trajectory = trajectory_of(rid)
    if len(trajectory) > MAX_CHARACTERS:
        raise NameRefused(
            f"The request id has {len(trajectory)} characters and a trajectory's name has at most "
            f"{MAX_CHARACTERS}; send a shorter rid."
        )
    try:
        trajectory.encode()
    except UnicodeEncodeError:
        raise NameRefused(
            f"The request id {rid!r:.80} is not valid Unicode; send a rid without surrogates."
        ) from None
    return trajectory


def warm_up_name() -> str:
    """Return a fresh id for a request of the server's own."""
    return f"{WARM_UP}_{uuid.uuid4().hex}"


def sample_name(rid: str, sample: int) -> str:
    """Return the id of sample `sample` of n of the request `rid`."""
    name, mark, turn = rid.partition(SUFFIX_MARK)
    return f"{name}/{sample}{mark}{turn}"


def prompt_names(request: Any) -> list[str]:
    """Return the ids of the prompts of a request that SGLang has normalized, in their order.

    With n > 1 and one id, some releases make an id of every sample, also if there is one prompt.
    """
    if isinstance(request.rid, str):
        return [request.rid]
    rids, prompts = list(request.rid), request.batch_size
    if prompts == 1 and len(rids) > 1:
        return [rids[0].removesuffix("_0")]
    return rids[:prompts]


def name_of_sample(request: Any, number: int) -> str:
    """Return the id of output `number` of a request with n > 1: prompt by prompt, n of each."""
    prompt, sample = divmod(number, request.parallel_sample_num)
    return sample_name(prompt_names(request)[prompt], sample)


def check_names(request: Any) -> None:
    """Refuse a request that SGLang has normalized if it could not be recorded under its ids.

    Raises:
        NameRefused: an id names no trajectory, a name is too long, or two prompts share one.
    """
    names = [name for name in prompt_names(request) if not is_own(name)]
    samples = getattr(request, "parallel_sample_num", 1)
    try:
        trajectories = [checked_trajectory(name) for name in names]
        if samples > 1:
            # The last one has the longest name.
            trajectories = [checked_trajectory(sample_name(name, samples - 1)) for name in names]
    except TraceError as error:
        raise NameRefused(str(error)) from None
    if len(set(trajectories)) < len(trajectories):
        raise NameRefused(
            "Several prompts of one request would extend one trajectory; send a list of rids with "
            "a different name before '#' for every prompt."
        )
