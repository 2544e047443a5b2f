"""The size of a token's record as a table: `python -m bridge cost`, and docs/record-size.md.

All figures are `RecordLayout.breakdown()`; nothing here counts bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bridge.errors import TraceError
from bridge.formats import LOW_SCALE_BITS
from bridge.layout import Kind, ModelShape, RecordLayout, Site, parse_layers

PUBLISHED = {
    # A hybrid: full attention in every fourth layer.
    "Qwen3.5-35B-A3B": ModelShape(
        num_layers=40,
        hidden_size=2048,
        moe_intermediate_size=512,
        num_experts=256,
        top_k=8,
        num_kv_heads=2,
        head_dim=256,
        moe_layers=tuple(range(40)),
        attention_layers=tuple(range(3, 40, 4)),
    ),
    "Qwen3-30B-A3B": ModelShape(
        num_layers=48,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        top_k=8,
        num_kv_heads=4,
        head_dim=128,
        moe_layers=tuple(range(48)),
        attention_layers=tuple(range(48)),
    ),
}
"""Shapes of published models, from their config.json."""


@dataclass(frozen=True)
class Choice:
    """A choice of `--trace-sites`, `--trace-layers` and `--trace-bits`."""

    sites: tuple[Site, ...]
    layers: str
    bits: int

    def layout(self, shape: ModelShape) -> RecordLayout:
        """Return the record layout for a model, block scales whole."""
        return RecordLayout(
            shape, parse_layers(self.layers, shape.num_layers), self.sites, self.bits
        )


_PAPER = (Site.FC1, Site.K, Site.V)
CHOICES = (
    Choice((*_PAPER, Site.ROUTES), "deeper-half", 1),
    Choice(tuple(Site), "deeper-half", 1),
    Choice((*_PAPER, Site.ROUTES), "all", 4),
    Choice(tuple(Site), "all", 4),
)
"""The default first."""

_COLUMNS = (
    *("model", "sites", "layers", "bits", "code words", "scales, 8 / 2 bits", "token scales"),
    *("routes", "bytes a token, 8 / 2 bits"),
)


class UnreadableConfig(TraceError):
    """A file is not a model's config.json."""


def cost_table(models: Mapping[str, ModelShape]) -> str:
    """Return the bytes per token of every choice for every model, as a Markdown table."""
    rows = [_row(name, choice, shape) for name, shape in models.items() for choice in CHOICES]
    lines = (f"| {' | '.join(cells)} |" for cells in (_COLUMNS, ["---"] * len(_COLUMNS), *rows))
    return "\n".join(lines)


def read_model(config: Path) -> dict[str, ModelShape]:
    """Read a model's shape from its config.json, under the name of its folder.

    Raises:
        LayoutError: if the model cannot be recorded.
        UnreadableConfig: if the file is none.
    """
    try:
        shape = ModelShape.from_hf_config(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UnreadableConfig(
            f"{config} is not a model's config.json ({error}): give the file beside its weights"
        ) from error
    return {config.resolve().parent.name: shape}


def _row(name: str, choice: Choice, shape: ModelShape) -> Iterator[str]:
    whole = choice.layout(shape)
    low = replace(whole, scale_bits=LOW_SCALE_BITS)
    yield from (name, ", ".join(choice.sites), choice.layers, str(choice.bits))
    yield _number(_of_kind(whole, Kind.CODES))
    yield " / ".join(_number(_of_kind(layout, Kind.SCALES)) for layout in (whole, low))
    yield _number(_of_kind(whole, Kind.TOKEN_SCALE))
    yield _number(_of_kind(whole, Kind.ROUTES))
    yield " / ".join(f"**{_number(layout.bytes_per_token())}**" for layout in (whole, low))


def _of_kind(layout: RecordLayout, kind: Kind) -> int:
    return sum(kinds.get(kind, 0) for kinds in layout.breakdown().values())


def _number(count: int) -> str:
    return f"{count:,}"
