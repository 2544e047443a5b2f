"""The layout of a record, byte for byte, and the size of a token."""

from bridge.layout.record import Field, RecordLayout
from bridge.layout.shape import ModelShape, deeper_half, parse_layers
from bridge.layout.shard import Shard
from bridge.layout.site import Kind, Part, Site, SiteRecord
from bridge.layout.tensor_slice import TensorSlice

__all__ = [
    "Field",
    "Kind",
    "ModelShape",
    "Part",
    "RecordLayout",
    "Shard",
    "Site",
    "SiteRecord",
    "TensorSlice",
    "deeper_half",
    "parse_layers",
]
