import pytest

from sglang_trace.names import WARM_UP, client_trajectory


@pytest.mark.parametrize("rid", ["HEALTH_CHECK_7", WARM_UP, "#2", "", "n" * 1025])
def test_requests_that_are_no_trajectory(rid: str) -> None:
    assert client_trajectory(rid) is None


def test_turns_belong_to_the_trajectory_before_the_mark() -> None:
    assert client_trajectory("group-3/sample-1#turn2") == "group-3/sample-1"
