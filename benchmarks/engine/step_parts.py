"""What the kernels of a decode step belong to, by their names.

A kernel that matches nothing is part of the rest: dense GEMMs, norms, rotary embedding, sampling.
Quantizing and recording an activation is one kernel, so what capture costs inside it cannot be
told from a profile; it is the difference between two configurations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler_util import DeviceType

# The first that matches. Copies are those between buffers and to the host, the records' included.
PARTS = {
    "copies": r"^Memcpy|^Memset",
    "attention": (
        r"BatchDecode|BatchPrefill|SinglePrefill|PagedKVCache|MergeState|flash_fwd|fmha"
        r"|_fwd_(grouped_)?kernel_stage|_fwd_kernel|attention|paged_decode|decode_split|_split_kv"
        r"|attend_tiles|\bmerge\(|kv_indices|store_kv|kv_cache|_write_kv|_kv_rows"
    ),
    "experts": (
        r"fused_moe|moe_|_moe|topk|_multiply|_sort_rows|_combine|_quantize_tokens|_quantize_slots"
        r"|act_and_mul|silu_and_mul|expert"
    ),
}
REST = "rest"
LARGEST = 12


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    for part, pattern in PARTS.items():
        if re.search(pattern, kernel):
            return part
    return REST


def split(us_by_kernel: dict[str, float], steps: int) -> dict[str, float]:
    """Milliseconds a step by part, from microseconds of all steps by kernel."""
    total = dict.fromkeys((*PARTS, REST), 0.0)
    for kernel, us in us_by_kernel.items():
        total[part_of(kernel)] += us
    return {part: round(us / 1000 / steps, 4) for part, us in total.items()}


def largest(us_by_kernel: dict[str, float], steps: int) -> list[list[Any]]:
    """[part, kernel, milliseconds a step] of the longest kernels: a check of the split."""
    found = sorted(us_by_kernel.items(), key=lambda item: -item[1])[:LARGEST]
    return [[part_of(name), name[:100], round(us / 1000 / steps, 4)] for name, us in found]


def profile(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Run `step` under torch's profiler; returns microseconds by GPU kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    }
