"""Two ranks share the rows of one expert's weight; one rank at a time changes its part."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bridge.fp4.nvfp4 import quantize_weight
from megatron_trace.layers.weights import ExpertWeight
from megatron_trace.rounding.expert_group import ExpertGroup


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    part = whole.chunk(2)[rank].clone()
    site = ExpertWeight(ExpertGroup([part], 1, torch.float32, dist.group.WORLD), 0)

    def check() -> None:
        expected = quantize_weight(whole).dequantize(torch.float32).chunk(2)[rank]
        assert torch.equal(site.round_weight(part), expected)

    check()
    first = site.round_weight(part).data_ptr()
    assert site.round_weight(part).data_ptr() == first, "nothing has changed"
    for owner in (0, 1):
        # Beyond the largest value so far, so the other rank's scale changes as well.
        whole[16 * owner, 3] = 100.0 * (owner + 1)
        part.copy_(whole.chunk(2)[rank])
        check()
    if rank == 0:
        site.kept.free()  # as an optimizer step on one rank does
    check()
    whole = whole.roll(16, 0)  # the ranks exchange their parts
    part.copy_(whole.chunk(2)[rank])
    check()
    dist.destroy_process_group()


main()
