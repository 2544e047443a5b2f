"""What prefill takes at once, so that BF16 keys and values never need more than a fixed scratch.

Shape legend: B requests of a piece, S = B + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Of BF16 keys and values together. Two requests of 131,072 keys of 4 heads of 128 fit in, and it is
# small beside what SGLang leaves free for activations.
SCRATCH_BYTES = 512 << 20
# A request with this many keys is a piece of its own: flash attention then splits its keys over the
# GPU, which it does not do for several requests, and the launches are small beside its work.
LONG = 8192


@dataclass(frozen=True)
class Piece:
    """Requests that follow each other, all their new tokens, and some of their KV heads.

    requests    which of the pass
    tokens      their query tokens
    heads       KV heads
    max_new    query tokens of the request that has most
    max_keys   keys of the longest request, the query tokens' included
    q_starts_S  int32 [B + 1], first query token of each request in the piece, and their number
    k_starts_S  int32 [B + 1], the same of its keys
    keys        of all requests
    """

    requests: slice
    tokens: slice
    heads: slice
    max_new: int
    max_keys: int
    q_starts_S: Tensor
    k_starts_S: Tensor
    keys: int


def pieces_of(
    new: list[int],
    lengths: list[int],
    *,
    heads: int,
    size: int,
    device: torch.device | str,
) -> list[Piece]:
    """Divide a pass so that the keys and values of every piece fit into the scratch.

    The least is one KV head of one request, whatever that takes: more than the scratch beyond
    1,048,576 keys with heads of 128. Does not wait for the device.

    Args:
        new: query tokens of each request, at least 1.
        lengths: keys of each request, the query tokens' included.
        heads: KV heads.
        size: head size.
        device: where the starts go.
    """
    room = SCRATCH_BYTES // (2 * torch.bfloat16.itemsize * size)
    groups = list(_groups(lengths, room // heads))
    starts: list[int] = []
    for group in groups:
        for counts in (new[group], lengths[group]):
            starts += _starts(counts)
    # Pinned, because a copy from other memory may wait for what the device has to do before it.
    pinned = torch.device(device).type == "cuda"
    on_device = torch.tensor(starts, dtype=torch.int32, pin_memory=pinned).to(
        device, non_blocking=True
    )
    sizes = [group.stop - group.start + 1 for group in groups for _ in range(2)]
    found = []
    token = 0
    starts_of = iter(torch.split(on_device, sizes))
    for group, q_starts_S, k_starts_S in zip(groups, starts_of, starts_of, strict=True):
        tokens = slice(token, token + sum(new[group]))
        token = tokens.stop
        keys = sum(lengths[group])
        for some in _heads(heads, room // keys):
            found.append(
                Piece(
                    requests=group,
                    tokens=tokens,
                    heads=some,
                    max_new=max(new[group]),
                    max_keys=max(lengths[group]),
                    q_starts_S=q_starts_S,
                    k_starts_S=k_starts_S,
                    keys=keys,
                )
            )
    return found


def _groups(lengths: list[int], room: int) -> Iterator[slice]:
    """Yield requests to take together: long ones alone, of others as many as have room."""
    begin = keys = 0
    for request, length in enumerate(lengths):
        if request > begin and (
            keys + length > room or length >= LONG or lengths[request - 1] >= LONG
        ):
            yield slice(begin, request)
            begin, keys = request, 0
        keys += length
    if lengths:
        yield slice(begin, len(lengths))


def _starts(counts: list[int]) -> list[int]:
    """Return where each of the parts begins, and where the last ends."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _heads(heads: int, most: int) -> Iterator[slice]:
    """Yield the KV heads in as few parts of almost the same size as `most` allows."""
    parts = -(-heads // max(1, most))
    for part in range(parts):
        yield slice(part * heads // parts, (part + 1) * heads // parts)
