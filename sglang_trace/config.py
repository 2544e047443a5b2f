"""What `--trace-*` says, and how it reaches SGLang's processes.

The launcher parses the flags and writes them to one environment variable; SGLang spawns its
scheduler with the same environment, where the capture hooks read them back.
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bridge.errors import TraceError
from bridge.formats import FULL_SCALE_BITS, SCALE_BITS
from bridge.layout import ModelShape, RecordLayout, Site, parse_layers
from bridge.producer.producer import Overflow
from bridge.transport.endpoints import DEFAULT_ENDPOINT

ENVIRONMENT = "SGLANG_TRACE"
# What the sites are recorded from: values of --quantization and --kv-cache-dtype.
QUANTIZATION = "trace_nvfp4"
KV_CACHE_DTYPE = "nvfp4"
# Value of --attention-backend.
ATTENTION_BACKEND = "trace_fp4"
DEFAULT_SITES = (Site.FC1, Site.K, Site.V, Site.ROUTES)
DEFAULT_LAYERS = "deeper-half"


class InvalidOption(TraceError):
    """A --trace-* option has a value that means nothing."""


@dataclass(frozen=True)
class TraceConfig:
    """What is captured and where it goes.

    bridge   endpoint of the bridge daemon, or those of several, separated by commas
    sites    what is recorded
    layers   "deeper-half", "all" or a list such as "0,3,5-7"
    bits     low bits kept of each code word, 1 to 4
    scale_bits    bits kept of each block scale, 8 or 2
    on_overflow   what happens to records that the bridge does not take in time
    failure_file  where a process of the server writes the error message that ended it
    bridge_keys   this client's key file, empty for a bridge without keys
    run           names this run of the server, the same in all its processes
    """

    bridge: str
    sites: tuple[Site, ...] = DEFAULT_SITES
    layers: str = DEFAULT_LAYERS
    bits: int = 1
    scale_bits: int = FULL_SCALE_BITS
    on_overflow: Overflow = Overflow.BLOCK
    failure_file: str = ""
    bridge_keys: str = ""
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    def layout(self, shape: ModelShape) -> RecordLayout:
        """Return the record layout for a model."""
        layers = parse_layers(self.layers, shape.num_layers)
        return RecordLayout(shape, layers, self.sites, self.bits, self.scale_bits)

    def to_environment(self) -> dict[str, str]:
        """Return the environment entry that `from_environment` reads."""
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> TraceConfig | None:
        """Return the configuration of this process, None when it does not capture."""
        text = os.environ.get(ENVIRONMENT)
        if not text:
            return None
        fields = json.loads(text)
        fields["sites"] = tuple(Site(site) for site in fields["sites"])
        fields["on_overflow"] = Overflow(fields["on_overflow"])
        return cls(**fields)

    def report_failure(self, message: str) -> None:
        """Write the error message for the launcher, which outlives the server; keep the first."""
        if self.failure_file and not Path(self.failure_file).exists():
            Path(self.failure_file).write_text(message, encoding="utf-8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the --trace-* options as a group of their own."""
    group = parser.add_argument_group(
        "trace", "Record what the FP4 rollout rounded to, for the trainer to follow."
    )
    group.add_argument(
        "--trace-capture", action="store_true", help="Record. Without it: plain SGLang."
    )
    group.add_argument(
        "--trace-bridge",
        metavar="ENDPOINT[,ENDPOINT...]",
        help=f"Bridge daemon, such as {DEFAULT_ENDPOINT}, or several, over which trajectories are "
        "spread; the trainer names them in the same order. Default: one of the server's own.",
    )
    group.add_argument(
        "--trace-bridge-keys",
        metavar="FILE",
        help="Key file for --trace-bridge, made by `python -m bridge keys`.",
    )
    group.add_argument(
        "--trace-bridge-http",
        metavar="127.0.0.1:PORT",
        help="Serve a status page and /metrics of the server's own bridge here.",
    )
    group.add_argument(
        "--trace-dir",
        metavar="DIR",
        help="Where the server's own bridge keeps its records. Default: in memory.",
    )
    group.add_argument(
        "--trace-sites",
        metavar="LIST",
        type=parse_sites,
        default=DEFAULT_SITES,
        help=f"Comma-separated, of {', '.join(Site)}. Default: {','.join(DEFAULT_SITES)}.",
    )
    group.add_argument(
        "--trace-layers",
        metavar="LAYERS",
        default=DEFAULT_LAYERS,
        help='"deeper-half" (default), "all" or a list such as "0,3,5-7"; routes are of all.',
    )
    group.add_argument(
        "--trace-bits",
        type=int,
        choices=(1, 2, 3, 4),
        default=1,
        help="Low bits kept of each code word; 4 is the whole code word. Default: 1.",
    )
    group.add_argument(
        "--trace-scale-bits",
        type=int,
        choices=SCALE_BITS,
        default=FULL_SCALE_BITS,
        help="Bits kept of each block scale: 8 is the whole scale (default); of 2, a quarter of "
        "the bytes, the trainer finds the scale next to its own.",
    )
    group.add_argument(
        "--trace-on-overflow",
        type=Overflow,
        choices=tuple(Overflow),
        default=Overflow.BLOCK,
        help="When the bridge cannot keep up: wait for it (block, default), or give rows up, which "
        "the trainer then rounds to nearest (drop).",
    )


def parse_sites(text: str) -> tuple[Site, ...]:
    """Read a comma-separated list of sites.

    Raises:
        argparse.ArgumentTypeError: for an unknown site or an empty list.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in tuple(Site)]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is not a site: choose from {', '.join(Site)}"
        )
    return tuple(site for site in Site if site in names)
