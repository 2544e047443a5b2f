"""Series of patches for pinned upstream releases, and the tool that applies and checks them.

A launcher calls :func:`verify_target` before it imports the upstream. Nothing here imports it.
"""

from patches.apply.state import verify_target
from patches.errors import PatchError

__all__ = ["PatchError", "verify_target"]
