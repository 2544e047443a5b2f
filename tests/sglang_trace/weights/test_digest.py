"""The digest of all weights: equal for equal bits, another for any that differ."""

from __future__ import annotations

import pytest
import sglang.srt.layers.quantization  # noqa: F401 - SGLang's own order of imports
import torch
from torch import nn

from sglang_trace.weights import digest
from sglang_trace.weights.digest import digest_of_model, digest_of_tensor


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))


def test_equal_weights_have_equal_digests() -> None:
    assert digest_of_model(model(), {}) == digest_of_model(model(), {})
    assert len(digest_of_model(model(), {})) == 64


@pytest.mark.parametrize("name", list(model().state_dict()))
def test_any_parameter_and_saved_buffer_counts(name: str) -> None:
    changed = model()
    tensor = changed.state_dict()[name]
    tensor.view(-1)[-1] += 1
    assert digest_of_model(changed, {}) != digest_of_model(model(), {})


def test_expert_matrices_count_by_their_own_digests() -> None:
    digests = [digest_of_model(model(), experts) for experts in ({}, {"e": "aa"}, {"e": "ab"})]
    assert len(set(digests)) == 3


def test_a_tensor_is_hashed_with_its_type_and_shape() -> None:
    zeros = [
        torch.zeros(4, dtype=torch.float32),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, 2),
        torch.zeros(0),
    ]
    assert len({digest_of_tensor(each) for each in zeros}) == 4
    transposed = torch.arange(6.0).view(2, 3).t()
    assert digest_of_tensor(transposed) == digest_of_tensor(transposed.contiguous())
    assert digest_of_tensor(torch.tensor(3.0)) != digest_of_tensor(torch.tensor(4.0))


def test_pieces_make_the_digest_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000).bfloat16()
    whole = digest_of_tensor(tensor)
    monkeypatch.setattr(digest, "PIECE_BYTES", 7)
    assert digest_of_tensor(tensor) == whole
