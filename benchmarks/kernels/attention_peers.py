"""The kernels that `benchmarks.kernels.decode_attention` compares: ours and FlashInfer's.

FlashInfer's BF16 and FP8 kernels read the values of the FP4 pool, dequantized; its FA2 kernel for
NVFP4 reads the pool itself (block scales of keys and values both in their plain order: the other
order is that of a kernel for another architecture). It plans outside the graph, once a page table.

All are compiled with nvcc on their first use, FlashInfer's in a minute each: `Compiling` does that
beforehand in processes of their own, `python -m benchmarks.kernels.attention_peers PEER` with a
shape.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from benchmarks.kernels.attention_case import (
    BF16_BITS,
    FP8_BITS,
    K_SCALE,
    NVFP4_BITS,
    V_SCALE,
    Case,
    Inputs,
)

Call = Callable[[int], object]
WORKSPACE_BYTES = 512 << 20
# Of nvcc: together as many as a host with 16 cores has.
COMPILERS, JOBS = 4, 4


@dataclass(frozen=True)
class Peer:
    """`prepare` returns what computes `Inputs.out` from a set of pages."""

    name: str
    bits: float
    prepare: Callable[[Inputs], Call]


def prepare_ours(inputs: Inputs) -> Call:
    from sglang_trace.attention.decode import PagedDecode
    from sglang_trace.attention.paged_kv import PagedKV

    case = inputs.case
    attend = PagedDecode(
        num_q_heads=case.q_heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        max_batch=case.batch,
        device=inputs.q.device,
    )

    pages = [
        PagedKV(
            inputs.k_codes,
            inputs.k_scales,
            inputs.v_codes,
            inputs.v_scales,
            table_RE,
            inputs.rows,
            inputs.lengths,
            case.page_size,
            K_SCALE,
            V_SCALE,
        )
        for table_RE in inputs.tables
    ]

    def call(which: int) -> object:
        return attend(inputs.q, pages[which], sm_scale=inputs.sm_scale, out_BHD=inputs.out)

    return call


def plan(inputs: Inputs, stored: torch.dtype) -> list[Any]:
    """A FlashInfer wrapper for every set of pages, all with one workspace."""
    import flashinfer

    case = inputs.case
    pages = torch.tensor(case.pages(), dtype=torch.int32)
    starts = torch.zeros(case.batch + 1, dtype=torch.int32)
    starts[1:] = pages.cumsum(0)
    last = torch.tensor(case.lengths(), dtype=torch.int32) - (pages - 1) * case.page_size
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.device)
    wrappers = []
    for table in inputs.tables:
        numbers = torch.cat([table[row, :count] for row, count in enumerate(case.pages())])
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(
            starts,
            numbers,
            last,
            case.q_heads,
            case.kv_heads,
            case.head_dim,
            case.page_size,
            q_data_type=torch.bfloat16,
            kv_data_type=stored,
            sm_scale=inputs.sm_scale,
        )
        wrappers.append(wrapper)
    return wrappers


def prepare_bf16(inputs: Inputs) -> Call:
    k, v = (inputs.paged(each) for each in inputs.bf16)
    wrappers = plan(inputs, torch.bfloat16)
    return lambda which: wrappers[which].run(inputs.q, (k, v), out=inputs.out)


def prepare_fp8(inputs: Inputs) -> Call:
    k, v = (inputs.paged(each.to(torch.float8_e4m3fn)) for each in inputs.bf16)
    inputs.forget_bf16()
    wrappers = plan(inputs, torch.float8_e4m3fn)
    return lambda which: wrappers[which].run(inputs.q, (k, v), out=inputs.out)


def prepare_nvfp4(inputs: Inputs) -> Call:
    codes = inputs.paged(inputs.k_codes), inputs.paged(inputs.v_codes)
    scales = (
        inputs.paged(inputs.k_scales).view(torch.float8_e4m3fn),
        inputs.paged(inputs.v_scales).view(torch.float8_e4m3fn),
    )
    wrappers = plan(inputs, torch.uint8)
    return lambda which: wrappers[which].run(
        inputs.q, codes, kv_cache_sf=scales, k_scale=K_SCALE, v_scale=V_SCALE, out=inputs.out
    )


OURS, BF16 = "ours", "FlashInfer BF16"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, NVFP4_BITS, prepare_ours),
        Peer(BF16, BF16_BITS, prepare_bf16),
        Peer("FlashInfer FP8", FP8_BITS, prepare_fp8),
        Peer("FlashInfer FA2 NVFP4", NVFP4_BITS, prepare_nvfp4),
    )
}


def small(case: Case) -> Case:
    """One short row with the heads of `case`: what is compiled for it serves that case too."""
    heads = (case.q_heads, case.kv_heads, case.head_dim)
    return Case("compiled", 1, *heads, tokens=64)


class Compiling:
    """Compiles kernels in processes of their own, a few at once, while others are measured.

    In the order in which they are wanted. What fails there fails again where it is reported.
    """

    def __init__(self, wanted: Iterable[tuple[Peer, Case]]) -> None:
        self._threads = ThreadPoolExecutor(COMPILERS)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ended: dict[tuple[str, Case], Future[None]] = {}
        for peer, case in wanted:
            key = peer.name, small(case)
            if key not in self._ended:
                self._ended[key] = self._threads.submit(self._compile, *key)

    def _compile(self, peer: str, case: Case) -> None:
        shape = [str(number) for number in (case.q_heads, case.kv_heads, case.head_dim)]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.attention_peers", peer, *shape],
            env=os.environ | {"MAX_JOBS": str(JOBS)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._running.add(process)
        process.wait()
        self._running.discard(process)

    def wait(self, peer: Peer, case: Case) -> None:
        """Return when the kernel for that case has been compiled, or could not be."""
        self._ended[peer.name, small(case)].result()

    def stop(self) -> None:
        """End what still runs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()


def main(
    peer: Annotated[str, typer.Argument(help="Name of a peer.")],
    q_heads: Annotated[int, typer.Argument(help="Query heads.")],
    kv_heads: Annotated[int, typer.Argument(help="KV heads.")],
    head_dim: Annotated[int, typer.Argument(help="Head size.")],
) -> None:
    """Computes one small case, so that its kernel lies in the cache."""
    case = small(Case("", 1, q_heads, kv_heads, head_dim))
    PEERS[peer].prepare(Inputs(case, 1, "cuda"))(0)
    torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
