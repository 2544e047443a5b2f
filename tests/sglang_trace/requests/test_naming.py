"""Request ids name the trajectory that they extend."""

import pytest

from bridge.errors import TraceError
from sglang_trace.requests.naming import trajectory_of


@pytest.mark.parametrize("rid", ["traj-7", "traj-7#turn2", "traj-7#retry1", "traj-7#turn2#retry1"])
def test_turns_and_retries_share_the_text_before_the_first_hash(rid: str) -> None:
    assert trajectory_of(rid) == "traj-7"


@pytest.mark.parametrize("rid", ["", "#", "#turn2"])
def test_an_id_without_a_name_is_refused(rid: str) -> None:
    with pytest.raises(TraceError, match="before the first '#'"):
        trajectory_of(rid)
