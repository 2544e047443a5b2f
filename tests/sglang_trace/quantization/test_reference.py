"""The batched W4A4 experts against a loop over tokens and slots that is written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bridge.fp4.nvfp4 import Fp4Tensor, quantize_nvfp4, quantize_weight, token_scale
from sglang_trace.quantization.reference import rows_by_expert, run_experts

TOKENS, SLOTS, HIDDEN, WIDTH, EXPERTS = 9, 2, 64, 32, 5


class Recorder:
    def __init__(self) -> None:
        self.seen: dict[str, Fp4Tensor | torch.Tensor] = {}

    def fc1(self, x_TH: Fp4Tensor) -> None:
        self.seen["fc1"] = x_TH

    def fc2(self, h_TKI: Fp4Tensor) -> None:
        self.seen["fc2"] = h_TKI

    def routes(self, expert_ids_TK: torch.Tensor) -> None:
        self.seen["routes"] = expert_ids_TK


@pytest.fixture
def layer() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    raw = [torch.randn(2 * WIDTH, HIDDEN).bfloat16() * 0.1 for _ in range(EXPERTS)]
    gate_up = [
        torch.cat([quantize_weight(half).dequantize(torch.bfloat16) for half in matrix.chunk(2)])
        for matrix in raw
    ]
    down = [
        quantize_weight(torch.randn(HIDDEN, WIDTH).bfloat16() * 0.1).dequantize(torch.bfloat16)
        for _ in range(EXPERTS)
    ]
    ids = torch.stack([torch.randperm(EXPERTS)[:SLOTS] for _ in range(TOKENS)]).int()
    return {
        "x": torch.randn(TOKENS, HIDDEN).bfloat16(),
        "weights": torch.softmax(torch.randn(TOKENS, SLOTS), -1),
        "ids": ids,
        "w13": torch.stack(gate_up),
        "w2": torch.stack(down),
    }


def written_out(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = []
    for token in range(TOKENS):
        x = layer["x"][token : token + 1]
        x_hat = quantize_nvfp4(x, token_scale(x)).dequantize(torch.bfloat16)
        total = torch.zeros(1, HIDDEN)
        for slot, expert in enumerate(layer["ids"][token].tolist()):
            gate, up = (x_hat @ layer["w13"][expert].T).chunk(2, dim=-1)
            h = F.silu(gate) * up
            h_hat = quantize_nvfp4(h, token_scale(h)).dequantize(torch.bfloat16)
            total += layer["weights"][token, slot] * (h_hat @ layer["w2"][expert].T).float()
        rows.append(total.bfloat16())
    return torch.cat(rows)


def run(layer: dict[str, torch.Tensor], recorder: Recorder | None = None) -> torch.Tensor:
    return run_experts(
        layer["x"], layer["weights"], layer["ids"], layer["w13"], layer["w2"], recorder
    )


def test_experts_compute_what_the_written_out_loop_does(layer: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(run(layer), written_out(layer), rtol=2**-7, atol=2**-7)


def test_recording_does_not_change_the_result(layer: dict[str, torch.Tensor]) -> None:
    assert torch.equal(run(layer), run(layer, Recorder()))


def test_the_recorder_sees_one_quantization_a_token_and_one_a_slot(
    layer: dict[str, torch.Tensor],
) -> None:
    recorder = Recorder()
    run(layer, recorder)
    fc1, fc2 = recorder.seen["fc1"], recorder.seen["fc2"]
    expected = quantize_nvfp4(layer["x"], token_scale(layer["x"]))
    assert isinstance(fc1, Fp4Tensor)
    assert torch.equal(fc1.codes_u8, expected.codes_u8)
    assert torch.equal(fc1.scales_u8, expected.scales_u8)
    assert isinstance(fc2, Fp4Tensor)
    assert fc2.codes_u8.shape == (TOKENS, SLOTS, WIDTH)
    assert fc2.global_scale.shape == (TOKENS, SLOTS, 1)
    assert torch.equal(recorder.seen["routes"], layer["ids"].long())


def test_a_tokens_records_do_not_depend_on_the_other_tokens(layer: dict[str, torch.Tensor]) -> None:
    together, alone = Recorder(), Recorder()
    run(layer, together)
    run({**layer, **{name: layer[name][3:4] for name in ("x", "weights", "ids")}}, alone)
    for site in ("fc1", "fc2"):
        assert torch.equal(together.seen[site].codes_u8[3:4], alone.seen[site].codes_u8)


def test_a_rows_scale_is_the_largest_of_its_parts() -> None:
    """What ranks that hold parts of a row agree on with one reduction."""
    rows = torch.randn(200, WIDTH) * 10.0 ** torch.randint(-30, 5, (200, 1))
    parts = torch.stack([token_scale(part) for part in rows.split(WIDTH // 2, dim=1)])
    assert torch.equal(parts.amax(0), token_scale(rows))


def test_every_row_is_served_by_exactly_its_expert() -> None:
    ids = torch.tensor([[3, 0], [0, 1], [3, 1]])
    served = {expert: rows.tolist() for expert, rows in rows_by_expert(ids, EXPERTS)}
    assert served == {0: [1, 2], 1: [3, 5], 3: [0, 4]}
