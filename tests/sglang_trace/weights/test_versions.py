import torch

from bridge.transport.bridge_sharding import row_number
from sglang_trace.weights.versions import WeightVersions


def labels_of(versions: WeightVersions, rows: list[int]) -> dict[int, str]:
    found = {}
    for weights, mask in versions.split(torch.tensor(rows)):
        found.update(
            {row: weights.label for row, hit in zip(rows, mask.tolist(), strict=True) if hit}
        )
    return found


def test_a_row_belongs_to_the_weights_in_use_when_it_was_numbered() -> None:
    versions = WeightVersions()
    versions.enter("v0", 0)
    versions.enter("v1", 10)
    assert labels_of(versions, [0, 9, 10, 25]) == {0: "v0", 9: "v0", 10: "v1", 25: "v1"}
    assert versions.current.label == "v1"


def test_a_row_belongs_to_its_weights_whatever_bridge_it_goes_to() -> None:
    versions = WeightVersions()
    versions.enter("v0", 0)
    versions.enter("v1", 10)
    rows = [row_number(count, shard) for count in (9, 10) for shard in (0, 3)]
    assert list(labels_of(versions, rows).values()) == ["v0", "v0", "v1", "v1"]


def test_an_update_without_a_new_name_gets_a_label_of_its_own() -> None:
    versions = WeightVersions()
    assert [versions.enter("default", row) for row in (0, 5, 9)] == [
        "default",
        "default+1",
        "default+2",
    ]
    assert versions.enter("v1", 12) == "v1"
    assert labels_of(versions, [4, 5, 9, 12]) == {
        4: "default",
        5: "default+1",
        9: "default+2",
        12: "v1",
    }


def test_an_update_in_several_parts_has_one_label() -> None:
    versions = WeightVersions()
    versions.enter("v0", 0)
    assert [versions.enter("v1", 8) for _part in range(3)] == ["v1"] * 3
    assert [versions.enter(None, 9) for _part in range(3)] == ["v1+1"] * 3
    assert labels_of(versions, [7, 8, 9]) == {7: "v0", 8: "v1", 9: "v1+1"}


def test_weights_that_computed_no_row_leave_no_label_behind() -> None:
    versions = WeightVersions()
    versions.enter("v0", 0)
    versions.enter("v1", 4)
    versions.enter("v2", 4)
    assert labels_of(versions, [3, 4]) == {3: "v0", 4: "v2"}


def test_one_label_for_two_weights_keeps_their_rows_apart() -> None:
    versions = WeightVersions()
    versions.enter("default", 0)
    versions.seal("aa")
    versions.enter("v1", 2)
    versions.enter("default", 4)
    versions.seal("bb")
    found = {weights: mask.tolist() for weights, mask in versions.split(torch.tensor([1, 5]))}
    assert found == {("default", "aa"): [True, False], ("default", "bb"): [False, True]}
