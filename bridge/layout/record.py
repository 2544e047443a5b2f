"""The layout of a recorded token row, byte for byte, and the size of a token.

A row has two parts that are sent at different times: FORWARD (routes, fc1, fc2) after each forward
pass, KV (k, v) when a request finishes and its FP4 cache is read back. The order of fields:

    FORWARD  every MoE layer's routes, then for each captured MoE layer its fc1, then its fc2
             slot by slot
    KV       for each captured attention layer its k, then its v

A quantized site is NVFP4: code planes (see `bridge.fp4.bit_planes`), E4M3 block scales, whole or
their low 2 bits (see `bridge.fp4.scale_bits`), and for fc1 and fc2 the token's FP32 scale. K and V
have one FP32 scale per layer, which the engine registers; it is not in the row. Multi-byte numbers
are little-endian.

Torch is imported inside the functions that handle tensors: the bridge daemon handles none and must
start without it.

Shape legend: T rows, K expert slots of a token (top-k), N values of a site, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from bridge.errors import LayoutError, SchemaMismatch
from bridge.formats import (
    FULL_SCALE_BITS,
    MAX_BITS,
    NVFP4_BLOCK,
    SCALE_BITS,
    plane_bytes,
    scale_bytes,
)
from bridge.layout.shape import MAX_LAYERS, ModelShape, check_layers, check_range
from bridge.layout.site import PART_OF, Kind, Part, Site, SiteRecord
from bridge.layout.tensor_slice import ALL_VALUES, TensorSlice

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_SCALE_BYTES = 4
MAX_ROW_BYTES = 1 << 24
# Far more than models have; the fields of a layout are listed in memory.
MAX_FIELDS = 1 << 14


@dataclass(frozen=True)
class Field:
    """One run of bytes of a row part. `slot` is the expert slot of fc2, None elsewhere."""

    site: Site
    layer: int
    slot: int | None
    kind: Kind
    offset: int
    nbytes: int


# A field before its place in the row is known: all of `Field` but the offset.
_Unplaced = tuple[Site, int, int | None, Kind, int]


@dataclass(frozen=True)
class RecordLayout:
    """Which bytes of a row hold what, for one model and one choice of layers, sites and bits.

    `bits` are kept of a code word, 1 to 4, and `scale_bits` of a block scale, 8 or 2. `layers` are
    the captured layers, ascending; a layer that has no experts or no KV cache simply lacks those
    sites. Routes, if chosen, are those of every MoE layer, captured or not. `tensor_slice` is which
    values are kept of split sites; `shape` stays that of the whole model.

    Raises:
        LayoutError: if layers, sites, bits or slice are not a choice the shape allows.
    """

    shape: ModelShape
    layers: tuple[int, ...]
    sites: tuple[Site, ...]
    bits: int = 1
    scale_bits: int = FULL_SCALE_BITS
    tensor_slice: TensorSlice = ALL_VALUES

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 1, MAX_BITS)
        if self.scale_bits not in SCALE_BITS:
            raise LayoutError(
                f"scale_bits is {self.scale_bits}: it must be one of {SCALE_BITS}, all bits of an "
                "E4M3 scale or the lowest two."
            )
        check_layers("layers", self.layers, self.shape.num_layers)
        self.tensor_slice.check(self.shape)
        self._check_scale_bytes()
        # One order for equal choices, so that equal layouts compare and hash equal.
        object.__setattr__(self, "sites", tuple(site for site in Site if site in self.sites))
        per_layer = 3 * (self.shape.top_k if Site.FC2 in self.sites else 0) + 7
        max_fields = len(self.shape.moe_layers) + len(self.layers) * per_layer
        check_range("fields of a row", max_fields, 0, MAX_FIELDS)
        check_range("bytes of a row", self.bytes_per_token(), 0, MAX_ROW_BYTES)

    def _check_scale_bytes(self) -> None:
        """Refuse a slice that divides a byte of low scales: no rank's bytes would be another's."""
        multiple = 8 // self.scale_bits * NVFP4_BLOCK
        for site in self.sites:
            if site is Site.ROUTES:
                continue
            held, size = self.values(site), len(ALL_VALUES.values(site, self.shape))
            if held.start % multiple or (held.stop % multiple and held.stop != size):
                raise LayoutError(
                    f"Values {held.start} to {held.stop} of {size} at {site} divide a byte of "
                    f"{self.scale_bits}-bit block scales, which has those of {multiple} values: "
                    f"record whole scales (--trace-scale-bits {FULL_SCALE_BITS}), or fetch all "
                    "values."
                )

    # --- what lies where

    def fields(self, part: Part) -> tuple[Field, ...]:
        """Return the fields of a row part in byte order, without gaps."""
        return self._fields[part]

    def row_bytes(self, part: Part) -> int:
        """Return the bytes of one row of `part`; 0 if no site of the part is recorded."""
        last = self._fields[part][-1:]
        return last[0].offset + last[0].nbytes if last else 0

    def bytes_per_token(self) -> int:
        """Return the bytes that one token costs, both parts together."""
        return sum(self.row_bytes(part) for part in Part)

    def breakdown(self) -> dict[Site, dict[Kind, int]]:
        """Return the bytes per token by site and kind; the sum is `bytes_per_token()`."""
        table: dict[Site, dict[Kind, int]] = {site: {} for site in self.sites}
        for part in Part:
            for field in self.fields(part):
                kinds = table[field.site]
                kinds[field.kind] = kinds.get(field.kind, 0) + field.nbytes
        return table

    def site_layers(self, site: Site) -> tuple[int, ...]:
        """Return the layers that hold `site` in this record, ascending."""
        return tuple(layer for held, layer in self._columns if held is site)

    def layers_of(self, *sites: Site) -> tuple[int, ...]:
        """Return the layers that hold any of these sites in this record, ascending."""
        return tuple(sorted({layer for held, layer in self._columns if held in sites}))

    def columns(self, site: Site, layer: int) -> slice:
        """Return the byte columns of `site` at `layer` in its part's rows; fc2: all slots.

        Raises:
            LayoutError: if the record holds no such site.
        """
        try:
            return self._columns[site, layer]
        except KeyError:
            raise LayoutError(
                f"The record holds no {site} of layer {layer}: capture it in the rollout "
                f"or ask for the layers {self.site_layers(site)}."
            ) from None

    @cached_property
    def _fields(self) -> dict[Part, tuple[Field, ...]]:
        return {
            Part.FORWARD: tuple(_placed(self._forward_fields())),
            Part.KV: tuple(_placed(self._kv_fields())),
        }

    @cached_property
    def _columns(self) -> dict[tuple[Site, int], slice]:
        columns: dict[tuple[Site, int], slice] = {}
        for part in Part:
            for field in self.fields(part):
                key = (field.site, field.layer)
                start = columns[key].start if key in columns else field.offset
                columns[key] = slice(start, field.offset + field.nbytes)
        return columns

    def _forward_fields(self) -> Iterator[_Unplaced]:
        if Site.ROUTES in self.sites:
            for layer in self.shape.moe_layers:
                yield Site.ROUTES, layer, None, Kind.ROUTES, self.shape.top_k * self.id_bytes
        for layer in self.layers:
            if layer not in self.shape.moe_layers:
                continue
            if Site.FC1 in self.sites:
                yield from self._quantized(Site.FC1, layer, None)
            if Site.FC2 in self.sites:
                for slot in range(self.shape.top_k):
                    yield from self._quantized(Site.FC2, layer, slot)

    def _kv_fields(self) -> Iterator[_Unplaced]:
        for layer in self.layers:
            if layer in self.shape.attention_layers:
                for site in (Site.K, Site.V):
                    if site in self.sites:
                        yield from self._quantized(site, layer, None)

    def _quantized(self, site: Site, layer: int, slot: int | None) -> Iterator[_Unplaced]:
        n = self.width(site)
        yield site, layer, slot, Kind.CODES, plane_bytes(n, self.bits)
        yield site, layer, slot, Kind.SCALES, scale_bytes(n, self.scale_bits)
        if PART_OF[site] is Part.FORWARD:
            yield site, layer, slot, Kind.TOKEN_SCALE, TOKEN_SCALE_BYTES

    def values(self, site: Site) -> range:
        """Return which of the model's values of one token (and expert slot) a row holds."""
        return self.tensor_slice.values(site, self.shape)

    def width(self, site: Site) -> int:
        """Return N, the values of one token (and expert slot) at a quantized site."""
        return len(self.values(site))

    @property
    def id_bytes(self) -> int:
        """Bytes of one expert id."""
        return 1 if self.shape.num_experts <= 256 else 2

    # --- reading and writing rows

    def site(self, rows_u8: Tensor, site: Site, layer: int) -> SiteRecord:
        """Return `site` of `layer` out of rows uint8 [T, B] of the site's part.

        Raises:
            LayoutError: if the record holds no such site or the rows have another width.
        """
        cells = self._cells(rows_u8, site, layer)
        n = self.width(site)
        planes, scales = plane_bytes(n, self.bits), scale_bytes(n, self.scale_bits)
        tail = cells[..., planes + scales :]
        return SiteRecord(
            planes_u8=cells[..., :planes],
            scales_u8=cells[..., planes : planes + scales],
            token_scale=_float32_of(tail) if PART_OF[site] is Part.FORWARD else None,
            bits=self.bits,
            scale_bits=self.scale_bits,
        )

    def split(self, part: Part, rows_u8: Tensor) -> dict[tuple[Site, int], SiteRecord]:
        """Return every quantized site of rows uint8 [T, B], by site and layer."""
        return {
            (site, layer): self.site(rows_u8, site, layer)
            for site, layer in self._columns
            if PART_OF[site] is part and site is not Site.ROUTES
        }

    def routes(self, rows_u8: Tensor) -> Tensor:
        """Return the expert ids of all MoE layers in forward rows [T, B]: int64 [T, layers, K].

        They are in the engine's top-k order; layers are those of `shape.moe_layers`.
        """
        moe = self.shape.moe_layers
        columns = slice(
            self.columns(Site.ROUTES, moe[0]).start, self._columns[Site.ROUTES, moe[-1]].stop
        )
        ids = self._checked(rows_u8, Part.FORWARD)[:, columns].long()
        ids = ids.reshape(len(ids), len(moe), self.shape.top_k, self.id_bytes)
        return ids[..., 0] if self.id_bytes == 1 else ids[..., 0] | ids[..., 1] << 8

    def write_site(
        self,
        rows_u8: Tensor,
        site: Site,
        layer: int,
        codes_u8: Tensor,
        scales_u8: Tensor,
        token_scale: Tensor | None = None,
    ) -> None:
        """Write `site` of `layer` into rows uint8 [T, B] in place, on the rows' device, no waiting.

        Args:
            rows_u8: rows of the site's part, contiguous along B.
            site: a quantized site; routes go through `write_routes`.
            layer: a captured layer.
            codes_u8: uint8 [T, N] full code words, fc2: [T, K, N].
            scales_u8: uint8 [T, N / 16] full E4M3 codes, fc2: [T, K, N / 16].
            token_scale: float32 [T, 1], fc2: [T, K, 1]; None for k and v.
        """
        import torch

        from bridge.fp4.bit_planes import pack_planes
        from bridge.fp4.scale_bits import pack_low_scales

        cells = self._cells(rows_u8, site, layer)
        full = self.scale_bits == FULL_SCALE_BITS
        scales = scales_u8 if full else pack_low_scales(scales_u8)
        pieces = [pack_planes(codes_u8, self.bits), scales]
        if token_scale is not None:
            pieces.append(token_scale.contiguous().view(torch.uint8))
        cells.copy_(torch.cat(pieces, dim=-1))

    def write_routes(self, rows_u8: Tensor, layer: int, experts_TK: Tensor) -> None:
        """Write the expert ids [T, K] of MoE layer `layer` into forward rows [T, B] in place."""
        import torch

        ids = experts_TK.to(torch.int32).unsqueeze(-1)
        split = torch.cat((ids & 0xFF, ids >> 8)[: self.id_bytes], dim=-1).flatten(-2)
        rows = self._checked(rows_u8, Part.FORWARD)
        rows[:, self.columns(Site.ROUTES, layer)].copy_(split)

    def _cells(self, rows_u8: Tensor, site: Site, layer: int) -> Tensor:
        """Return the bytes of one site as a view: [T, bytes], fc2: [T, K, bytes of a slot]."""
        cells = self._checked(rows_u8, PART_OF[site])[:, self.columns(site, layer)]
        if site is Site.FC2:
            return cells.view(len(cells), self.shape.top_k, cells.shape[-1] // self.shape.top_k)
        return cells

    def _checked(self, rows_u8: Tensor, part: Part) -> Tensor:
        import torch

        if rows_u8.dtype != torch.uint8 or rows_u8.shape[1:] != (self.row_bytes(part),):
            raise LayoutError(
                f"Rows of {rows_u8.dtype} {tuple(rows_u8.shape)} are not {part} rows of this "
                f"layout: pass uint8 [T, {self.row_bytes(part)}]."
            )
        return rows_u8

    # --- asking for less

    def narrow(
        self,
        layers: Iterable[int] | None = None,
        sites: Iterable[Site] | None = None,
        tensor_slice: TensorSlice = ALL_VALUES,
    ) -> RecordLayout:
        """Return the layout that keeps only these layers, sites and values; None keeps all.

        Layers narrow the quantized sites; routes stay those of every MoE layer.

        Raises:
            LayoutError: if this record does not hold a layer, site or value that is asked for.
        """
        kept_layers = self.layers if layers is None else tuple(sorted(set(layers)))
        kept_sites = self.sites if sites is None else tuple(Site(site) for site in sites)
        if not (set(kept_layers) <= set(self.layers) and set(kept_sites) <= set(self.sites)):
            raise LayoutError(
                f"Layers {kept_layers} and sites {', '.join(kept_sites)} were asked for, but the "
                f"record holds layers {self.layers} and sites {', '.join(self.sites)}."
            )
        kept_slice = tensor_slice.within(self.tensor_slice)
        return replace(self, layers=kept_layers, sites=kept_sites, tensor_slice=kept_slice)

    # --- over the wire

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as a map of plain ints, strings and lists."""
        shape = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self.shape).items()}
        return {
            "shape": shape,
            "layers": list(self.layers),
            "sites": [str(site) for site in self.sites],
            "bits": self.bits,
            "scale_bits": self.scale_bits,
            "tensor_slice": self.tensor_slice.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the layout that `to_dict` described, checked and bounded.

        Raises:
            SchemaMismatch: if entries are missing, of a wrong type or out of bounds.
        """
        try:
            shape = {field.name: _plain(data["shape"][field.name]) for field in fields(ModelShape)}
            sites = tuple(Site(site) for site in data["sites"])
            layers, kept = _plain(data["layers"]), TensorSlice.from_dict(data["tensor_slice"])
            bits, scale_bits = _plain(data["bits"]), _plain(data["scale_bits"])
            return cls(ModelShape(**shape), layers, sites, bits, scale_bits, kept)
        except (LayoutError, KeyError, TypeError, ValueError) as error:
            raise SchemaMismatch(
                f"The record layout is not valid ({error}): "
                f"run the same release of sglang-trace on both sides."
            ) from error


def _placed(unplaced: Iterable[_Unplaced]) -> Iterator[Field]:
    offset = 0
    for site, layer, slot, kind, nbytes in unplaced:
        yield Field(site, layer, slot, kind, offset, nbytes)
        offset += nbytes


def _float32_of(bytes_u8: Tensor) -> Tensor:
    """Reinterpret [..., 4] bytes as float32 [..., 1]; copied, because columns are not aligned."""
    import torch

    return bytes_u8.clone(memory_format=torch.contiguous_format).view(torch.float32)


def _plain(value: Any) -> Any:
    """Return an int as it is and a list of ints as a tuple; refuse anything else, bools too."""
    if type(value) is int:
        return value
    if isinstance(value, list) and len(value) <= MAX_LAYERS and {type(v) for v in value} <= {int}:
        return tuple(value)
    raise TypeError(f"{value!r:.60} is neither an integer nor a short list of integers")
