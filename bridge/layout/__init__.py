"""What a record looks like, byte for byte, and what a token costs."""

from bridge.layout.record import Field, RecordLayout
from bridge.layout.shape import LayoutError, ModelShape, deeper_half, parse_layers
from bridge.layout.site import Kind, Part, Site, SiteRecord

__all__ = [
    "Field",
    "Kind",
    "LayoutError",
    "ModelShape",
    "Part",
    "RecordLayout",
    "Site",
    "SiteRecord",
    "deeper_half",
    "parse_layers",
]
