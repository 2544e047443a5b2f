"""The bridge daemon: one thread that ingests, stores, acknowledges and answers."""

from bridge.daemon.server import Daemon

__all__ = ["Daemon"]
