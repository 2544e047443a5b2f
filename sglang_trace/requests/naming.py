"""How requests are named after the trajectory they extend."""

from bridge.errors import TraceError

SUFFIX_MARK = "#"


class InvalidName(TraceError):
    """A request id does not name a trajectory."""


def trajectory_of(rid: str) -> str:
    """Return the trajectory that the request `rid` belongs to: the text before the first '#'.

    The turns of one trajectory share that text: "traj-7", "traj-7#2" and "traj-7#turn3" all belong
    to "traj-7".

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
