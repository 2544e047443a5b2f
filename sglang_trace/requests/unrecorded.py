"""Why a request is not recorded, said in the server's log and counted there."""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from typing import Any

from sglang_trace.requests.trajectory_names import client_trajectory, is_own

BAD_REQUEST = 400

# Attributes of a request that bring embeddings, for all or for some positions.
_EMBEDDINGS = ("input_embeds", "positional_embed_overrides")

logger = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why no trajectory is made of a client's request."""

    EMBEDDINGS = "its input are embeddings, and a trajectory is one of token ids"
    MULTIMODAL = "its input holds images, audio or video, and a trajectory is one of token ids"
    BEAMS = "the rows of a beam search belong to no single request"
    INVALID = "SGLang refused it and computed one token in the place of its prompt"
    NAMELESS = "its id names no trajectory; send a rid with a name before '#'"


def reason_at_start(req: Any) -> Reason | None:
    """Return why a request that begins is not recorded, None if it may be."""
    # Earlier releases know no beam search.
    if getattr(req, "beam_group", None) is not None:
        return Reason.BEAMS
    if any(getattr(req, name, None) is not None for name in _EMBEDDINGS):
        return Reason.EMBEDDINGS
    if getattr(req, "multimodal_inputs", None) is not None:
        return Reason.MULTIMODAL
    if client_trajectory(req.rid) is None and not is_own(req.rid):
        return Reason.NAMELESS
    return None


def reason_at_end(req: Any) -> Reason | None:
    """Return why a request that has ended is not recorded although it began as one that is."""
    reason = req.finished_reason or req.to_finish
    return Reason.INVALID if getattr(reason, "status_code", None) == BAD_REQUEST else None


class Unrecorded:
    """Counts requests that are not recorded; the log has the 1st, 10th, 100th ... of a reason."""

    def __init__(self) -> None:
        self.requests: Counter[Reason] = Counter()

    def count(self, rid: str, reason: Reason) -> None:
        """Note one request."""
        self.requests[reason] += 1
        number = self.requests[reason]
        if str(number).rstrip("0") == "1":
            logger.warning("Request %r is not recorded (no. %d): %s.", rid[:80], number, reason)

    def summarize(self) -> None:
        """Log how many there were, by reason."""
        for reason, number in self.requests.items():
            logger.warning("%d requests were not recorded: %s.", number, reason)
