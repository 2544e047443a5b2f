"""The inputs, byte counts and reference of the attention benchmark, which runs on a GPU only."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.gpu_timing import Table
from benchmarks.kernels.attention_case import (
    BF16_BITS,
    CASES,
    FP8_BITS,
    HEADLINE,
    K_SCALE,
    NVFP4_BITS,
    V_SCALE,
    Case,
    Inputs,
    errors,
)
from benchmarks.kernels.attention_peers import PEERS, Peer, small
from benchmarks.kernels.decode_attention import chosen, measure, passes
from bridge.fp4.nvfp4 import E2M1_MAGNITUDES

SMALL = Case("small", 3, q_heads=4, kv_heads=2, head_dim=32, tokens=2048, page_size=16, ragged=True)


def value(byte: int, high: bool, scale: int, global_scale: float) -> float:
    """A code word's value, spelled out."""
    code = byte >> 4 if high else byte & 0xF
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (scale >> 3) & 15, scale & 7
    return (
        sign * E2M1_MAGNITUDES[code & 7] * 2.0 ** (exponent - 7) * (1 + mantissa / 8) * global_scale
    )


def test_a_kernel_moves_every_key_and_value_once() -> None:
    case = Case("", 2, q_heads=8, kv_heads=4, head_dim=128, tokens=1000, page_size=16)
    values = 2 * 2 * 1000 * 4 * 128
    ends = 4 * 2 * 63 + 2 * 2 * 2 * 8 * 128
    assert case.nbytes(BF16_BITS) == 2 * values + ends
    assert case.nbytes(FP8_BITS) == values + ends
    # Half a byte of codes and a sixteenth of block scales.
    assert case.nbytes(NVFP4_BITS) == values * 9 // 16 + ends


def test_the_headline_reads_3_56_times_fewer_bytes_in_fp4() -> None:
    assert HEADLINE.nbytes(BF16_BITS) / HEADLINE.nbytes(NVFP4_BITS) == pytest.approx(
        3.556, abs=0.02
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_a_graph_reads_exceeds_the_cache_four_times(case: Case) -> None:
    assert case.sets() * case.nbytes(NVFP4_BITS) > 4 * (60 << 20) or case.sets() == 8


def test_cases_have_different_names_and_ragged_lengths_are_the_same_every_time() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    lengths = SMALL.lengths()
    assert lengths == SMALL.lengths()
    assert sorted(lengths) == [1024, 1448, 2048]


def test_sets_share_no_page_and_no_row_has_another_rows_slots() -> None:
    inputs = Inputs(SMALL, 2, "cpu")
    slots = torch.cat([inputs.slots(which, row) for which in range(2) for row in range(3)])
    assert len(slots.unique()) == len(slots) == 2 * sum(SMALL.lengths())
    assert slots.min() >= SMALL.page_size
    assert slots.max() < len(inputs.k_codes)


def test_dequantized_values_are_those_of_the_format() -> None:
    inputs = Inputs(SMALL, 1, "cpu")
    keys, values = inputs.bf16
    for stored, codes, scales, global_scale in (
        (keys, inputs.k_codes, inputs.k_scales, K_SCALE),
        (values, inputs.v_codes, inputs.v_scales, V_SCALE),
    ):
        for slot, head, column in ((0, 0, 0), (17, 1, 31), (99, 0, 18)):
            byte = int(codes[slot, head, column // 2])
            scale = int(scales[slot, head, column // 16])
            expected = value(byte, bool(column % 2), scale, global_scale)
            assert float(stored[slot, head, column]) == expected


def test_the_reference_is_attention_to_the_rows_own_tokens() -> None:
    inputs = Inputs(SMALL, 2, "cpu")
    keys, values = (each.double() for each in inputs.bf16)
    slots = inputs.slots(1, 2)
    head = 3
    scores = keys[slots, head // 2] @ inputs.q[2, head].double() / math.sqrt(32)
    expected = scores.softmax(0) @ values[slots, head // 2]
    torch.testing.assert_close(inputs.expected(1, 2)[head].double(), expected, rtol=1e-4, atol=1e-5)


def test_errors_are_relative_to_the_size_of_the_output() -> None:
    expected = torch.full((1, 2, 4), 0.5)
    got = expected.clone()
    got[0, 0, 0] += 0.25
    assert errors(got, expected) == {"max_error": 0.5, "rms_error": pytest.approx(0.1768, rel=1e-3)}


def test_a_kernel_that_is_not_there_is_a_row_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prepare(_inputs: Inputs) -> None:
        raise ModuleNotFoundError("No module named 'flashinfer'")

    table = Table(4000.0)
    measure(table, Inputs(SMALL, 1, "cpu"), Peer("absent", 16.0, prepare), {})
    (row,) = table.rows
    assert row["failed"] == "ModuleNotFoundError: No module named 'flashinfer'"
    assert (row["kernel"], row["case"], row["batch"]) == ("absent", "small", 3)
    assert "absent" in capsys.readouterr().out


def test_ours_and_bf16_come_first_on_every_case() -> None:
    order = passes(list(CASES[:2]), list(PEERS.values()))
    assert [(case.name, len(peers)) for case, peers in order] == [
        ("headline", 2),
        ("batch 1", 2),
        ("headline", 2),
        ("batch 1", 2),
    ]


def test_cases_with_the_same_heads_need_one_kernel() -> None:
    assert len({small(case) for case in CASES}) == 5


def test_an_unknown_name_is_refused() -> None:
    assert chosen("", {"a": 1, "b": 2}) == [1, 2]
    assert chosen(" b, a", {"a": 1, "b": 2}) == [2, 1]
    with pytest.raises(Exception, match="choose from a, b"):
        chosen("c", {"a": 1, "b": 2})
