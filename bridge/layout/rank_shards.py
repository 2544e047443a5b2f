"""The shards of a row on SGLang's ranks, from its tensor- and expert-parallel sizes.

Every rank of a tensor-parallel group computes the same tokens. The group's KV heads are split, or
repeated where there are fewer heads than ranks. `ep` groups of ranks hold different experts; the
ranks of one such group split the width of each of them (SGLang numbers those next to each other).
The first rank sends what is equal on all ranks.
"""

from __future__ import annotations

from bridge.errors import LayoutError
from bridge.layout.record import RecordLayout
from bridge.layout.shard import Shard
from bridge.layout.site import Site
from bridge.layout.tensor_slice import Bounds, TensorSlice


def rank_shards(layout: RecordLayout, tp: int, ep: int = 1) -> tuple[Shard, ...]:
    """Return the shard of each of the `tp` ranks of one engine, in rank order.

    Raises:
        LayoutError: the model cannot be split by these sizes.
    """
    if tp % ep:
        raise LayoutError(f"{tp} ranks cannot form {ep} equal groups of experts.")
    width = tp // ep
    return tuple(_shard(layout, rank, tp, width, by_slot=ep > 1) for rank in range(tp))


def _shard(layout: RecordLayout, rank: int, tp: int, width: int, by_slot: bool) -> Shard:
    shape = layout.shape
    heads = _heads(shape.num_kv_heads, rank, tp)
    sites = {Site.FC2}
    sites |= {Site.ROUTES, Site.FC1} if rank == 0 else set()
    sites |= {Site.K, Site.V} if heads is not None else set()
    kept = tuple(site for site in layout.sites if site in sites)
    fc2 = _part(shape.moe_intermediate_size, rank % width, width)
    narrowed = layout.narrow(sites=kept, tensor_slice=TensorSlice(fc2, heads))
    return Shard(narrowed, by_slot and Site.FC2 in kept)


def _heads(heads: int, rank: int, tp: int) -> Bounds | None:
    """Return a rank's KV heads, None for a rank that repeats those of the rank before it."""
    if tp <= heads:
        return _part(heads, rank, tp)
    repeats = tp // heads
    if tp % heads:
        raise LayoutError(f"{heads} KV heads cannot be repeated equally on {tp} ranks.")
    return None if rank % repeats else (rank // repeats, rank // repeats + 1)


def _part(size: int, rank: int, ranks: int) -> Bounds:
    if size % ranks:
        raise LayoutError(f"{size} cannot be split into {ranks} equal parts.")
    each = size // ranks
    return rank * each, (rank + 1) * each
