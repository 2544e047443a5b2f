"""The table of what a token costs: its figures are the layout's, in the docs too."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.cli.size_table import CHOICES, PUBLISHED, UnreadableConfig, cost_table, read_model
from bridge.errors import LayoutError, TraceError

ROOT = Path(__file__).resolve().parents[3]
QWEN_30B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_documentation_holds_the_table_as_it_is_printed() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "bridge", "cost"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == cost_table(PUBLISHED)
    assert printed in (ROOT / "docs" / "record-size.md").read_text()


def test_the_readme_names_the_bytes_of_the_default() -> None:
    layout = CHOICES[0].layout(PUBLISHED["Qwen3-30B-A3B"])
    readme = (ROOT / "README.md").read_text()
    for each in (layout, replace(layout, scale_bits=2)):
        assert f"{each.bytes_per_token():,}" in readme


def test_every_row_is_a_layout_and_its_parts_add_up() -> None:
    header, _, *rows = cells(cost_table(PUBLISHED))
    expected = [(name, choice) for name in PUBLISHED for choice in CHOICES]
    assert len(rows) == len(expected)
    for row, (name, choice) in zip(rows, expected, strict=True):
        named = dict(zip(header, row, strict=True))
        assert named["model"] == name
        layout = choice.layout(PUBLISHED[name])
        totals = named["bytes a token, 8 / 2 bits"].split(" / ")
        scales = named["scales, 8 / 2 bits"].split(" / ")
        for i, bits in enumerate((8, 2)):
            total = int(totals[i].strip("*").replace(",", ""))
            others = [named[key] for key in ("code words", "token scales", "routes")]
            assert total == sum(int(n.replace(",", "")) for n in (scales[i], *others))
            assert total == replace(layout, scale_bits=bits).bytes_per_token()


def test_the_table_of_a_config_is_that_of_the_same_shape(tmp_path: Path) -> None:
    config = tmp_path / "Qwen3-30B-A3B" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(QWEN_30B))
    name = "Qwen3-30B-A3B"
    assert cost_table(read_model(config)) == cost_table({name: PUBLISHED[name]})


@pytest.mark.parametrize("text", ["", "[]", "3", '{"text_config": 1}'])
def test_a_file_that_is_no_config_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(text)
    with pytest.raises(TraceError, match=r"config\.json"):
        read_model(config)
    with pytest.raises(UnreadableConfig):
        read_model(tmp_path / "missing.json")


def test_a_model_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN_30B | {"model_type": "llama"}))
    with pytest.raises(LayoutError, match="'llama' cannot be recorded"):
        read_model(config)
