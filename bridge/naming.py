"""How requests are named after the trajectory they extend."""

from bridge.errors import TraceError

SUFFIX_MARK = "#"


class InvalidName(TraceError):
    """A request id does not name a trajectory."""


def trajectory_of(rid: str) -> str:
    """Return the trajectory that the request `rid` belongs to: the text before the first '#'.

    Several turns, retries and resumed requests share one trajectory by sharing that text:
    "traj-7", "traj-7#turn2" and "traj-7#retry1" all belong to "traj-7".

    Raises:
        InvalidName: if nothing stands before the first '#'.
    """
    trajectory = rid.partition(SUFFIX_MARK)[0]
    if not trajectory:
        raise InvalidName(
            f"The request id {rid!r} names no trajectory: "
            f"put the trajectory's name before the first {SUFFIX_MARK!r}."
        )
    return trajectory
