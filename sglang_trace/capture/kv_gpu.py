"""K and V records on a GPU: gathered there by one kernel, counted where they arrive.

Which positions are due is known on the device only, and the scheduler's thread does not ask it.

Shape legend: T positions of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bridge.layout import Part, RecordLayout, Site
from sglang_trace.capture.device_to_host import ready_event
from sglang_trace.capture.events import DueRowsEvent
from sglang_trace.kernels.kv.gather_rows import KVRows, PoolSite
from sglang_trace.weights.versions import WeightVersions

# What one launch gathers at most: the memory that is held until the shipper has copied it.
PIECE_BYTES = 16 << 20


class KVGather:
    """Launches the gather of what the pool holds, in pieces that the shipper's queue can count."""

    def __init__(self, layout: RecordLayout, pool: Any) -> None:
        sites = []
        for layer in layout.layers_of(Site.K, Site.V):
            k, v, k_scales, v_scales = pool.get_raw_kv_buffer(layer)
            for site, codes, scales in ((Site.K, k, k_scales), (Site.V, v, v_scales)):
                if layer in layout.site_layers(site):
                    sites.append(PoolSite(site, layer, codes, scales.view(torch.uint8)))
        self._rows = KVRows(layout, sites)
        self._positions = max(1, PIECE_BYTES // layout.row_bytes(Part.KV))

    def events(
        self, rows_T: Tensor, slots_T: Tensor, due_T: Tensor, versions: WeightVersions
    ) -> Iterator[DueRowsEvent]:
        """Yield what is due at these positions; must end before the slots are given back.

        The kernels run on the current stream. A piece is gathered when it is asked for, so a full
        queue bounds what is held on the device.
        """
        for first in range(0, len(slots_T), self._positions):
            piece = slice(first, first + self._positions)
            due = self._rows.gather(slots_T[piece], rows_T[piece], due_T[piece])
            nbytes = due.rows_nB.nbytes + due.rows_n.nbytes
            yield DueRowsEvent(due, versions.split, nbytes, ready_event(due.rows_nB))
