"""Decode attention over paged NVFP4 keys and values: the CUDA kernel's Python side.

Shape legend: B requests, HQ query heads, H KV heads, D head size, P slots of the pool, b = D / 16
block scales, d = D / 2 bytes of codes, R rows and T columns of the page table.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_trace.attention.build import load
from sglang_trace.attention.paged_kv import PagedKV

HEAD_DIMS = (64, 128, 256)
MAX_GROUP = 16
MAX_LAUNCH = 512  # requests of a launch; a larger batch takes several
_WARPS = 8  # of a CTA
_WARP_PARTS = 16  # partial results that a warp of `merge` reads at once


@dataclass(frozen=True)
class Tuning:
    """How the kernel is cut for a shape.

    sub_tiles    16-token tiles that a warp takes from a stage
    stages       stages of the pipeline in shared memory
    ctas_per_sm  CTAs that share a multiprocessor
    """

    sub_tiles: int
    stages: int
    ctas_per_sm: int

    @classmethod
    def of(cls, head_dim: int, group: int) -> Tuning:
        """Return what was fastest for a shape on an H200 (benchmarks/kernels)."""
        match head_dim, group > 8:
            case (256, True):
                return cls(1, 4, 1)
            case (256, False):
                return cls(2, 3, 1)
            case (128, True):
                return cls(2, 4, 1)
            case (64, False):
                return cls(2, 4, 2)
        return cls(2, 3, 2)


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k_codes", "k_scales", "v_codes", "v_scales")),
        *((name, ctypes.c_void_p) for name in ("table", "rows", "lengths")),
        *((name, ctypes.c_void_p) for name in ("partial", "sums", "starts", "out")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "q_stride", "out_stride")),
        *((name, ctypes.c_int) for name in ("batch", "kv_heads", "page_shift")),
        *((name, ctypes.c_int) for name in ("rows_are_long", "lengths_are_long")),
        *((name, ctypes.c_int) for name in ("ctas", "merge_warps")),
        *((name, ctypes.c_float) for name in ("score_scale", "value_scale")),
    )


class PagedDecode:
    """Attention of one query token per request to all keys of the request (csrc/paged_decode.cu).

    Allocates its workspace once: 4 bytes times D + 2 for every query head of every partial result,
    of which there are at most CTAs + ``max_batch``. A call launches two kernels on the current
    stream (two for every MAX_LAUNCH requests), waits for nothing and allocates nothing, so it can
    be captured in a CUDA graph; lengths and pages are read when the graph is replayed.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_batch: int,
        device: torch.device | str,
        tuning: Tuning | None = None,
    ) -> None:
        """Compile for a shape and allocate for ``max_batch`` requests at once, or MAX_LAUNCH.

        Raises:
            ValueError: the kernel does not take the shape.
            KernelBuildError: it cannot be compiled here.
        """
        check_shape(num_q_heads, num_kv_heads, head_dim)
        max_batch = min(max_batch, MAX_LAUNCH)
        group = num_q_heads // num_kv_heads
        chosen = tuning or Tuning.of(head_dim, group)
        self._max_batch = max_batch
        self._heads = (num_q_heads, num_kv_heads, head_dim)
        head_block = math.gcd(num_kv_heads, _WARPS)
        self._library = load(
            "paged_decode.cu",
            {
                "HEAD_DIM": head_dim,
                "HEADS": head_block,
                "GROUP": group,
                "SUB_TILES": chosen.sub_tiles,
                "STAGES": chosen.stages,
                "CTAS_PER_SM": chosen.ctas_per_sm,
            },
        )
        self._device = torch.device(device)
        per_sm, shares = ctypes.c_int(), ctypes.c_int()
        with torch.cuda.device(self._device):
            self._check(
                self._library.paged_decode_prepare(
                    max_batch, ctypes.byref(per_sm), ctypes.byref(shares)
                )
            )
        sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        self._ctas = max(1, sms * per_sm.value // (num_kv_heads // head_block))
        parts = (self._ctas + max_batch) * shares.value * num_q_heads
        self._shares = shares.value
        self._partial = torch.empty(parts * head_dim, dtype=torch.float32, device=self._device)
        self._sums = torch.empty(parts * 2, dtype=torch.float32, device=self._device)
        self._starts = torch.empty(max_batch + 1, dtype=torch.int32, device=self._device)

    def __call__(
        self,
        q_BHD: Tensor,
        kv: PagedKV,
        *,
        sm_scale: float,
        out_BHD: Tensor,
    ) -> Tensor:
        """Write attention to ``out_BHD`` and return it.

        Args:
            q_BHD: bfloat16 [B, HQ, D], heads of a request adjacent.
            kv: keys and values of the requests; one with no keys gives zeros.
            sm_scale: factor of the scores before the softmax.
            out_BHD: bfloat16 [B, HQ, D].
        """
        num_q_heads, num_kv_heads, head_dim = self._heads
        assert q_BHD.dtype == out_BHD.dtype == torch.bfloat16
        assert q_BHD.shape == out_BHD.shape == (len(kv.rows_B), num_q_heads, head_dim)
        assert q_BHD.stride()[1:] == out_BHD.stride()[1:] == (head_dim, 1)
        for codes, scales in (
            (kv.k_codes_PHd, kv.k_scales_PHb),
            (kv.v_codes_PHd, kv.v_scales_PHb),
        ):
            assert codes.is_contiguous()
            assert codes.shape[1:] == (num_kv_heads, head_dim // 2)
            assert scales.is_contiguous()
            assert scales.shape[1:] == (num_kv_heads, head_dim // 16)
            assert codes.element_size() == scales.element_size() == 1
        assert kv.table_RE.dtype == torch.int32
        assert kv.table_RE.stride(1) == 1
        assert kv.page_size & (kv.page_size - 1) == 0
        stream = torch.cuda.current_stream(self._device).cuda_stream
        rows_are_long, lengths_are_long = _is_long(kv.rows_B), _is_long(kv.lengths_B)
        for first in range(0, len(q_BHD), self._max_batch):
            own = slice(first, first + self._max_batch)
            batch = len(q_BHD[own])
            arguments = _Arguments(
                q=q_BHD[own].data_ptr(),
                k_codes=kv.k_codes_PHd.data_ptr(),
                k_scales=kv.k_scales_PHb.data_ptr(),
                v_codes=kv.v_codes_PHd.data_ptr(),
                v_scales=kv.v_scales_PHb.data_ptr(),
                table=kv.table_RE.data_ptr(),
                rows=kv.rows_B[own].data_ptr(),
                lengths=kv.lengths_B[own].data_ptr(),
                partial=self._partial.data_ptr(),
                sums=self._sums.data_ptr(),
                starts=self._starts.data_ptr(),
                out=out_BHD[own].data_ptr(),
                table_stride=kv.table_RE.stride(0),
                q_stride=q_BHD.stride(0),
                out_stride=out_BHD.stride(0),
                batch=batch,
                kv_heads=num_kv_heads,
                page_shift=kv.page_size.bit_length() - 1,
                rows_are_long=rows_are_long,
                lengths_are_long=lengths_are_long,
                ctas=self._ctas,
                merge_warps=self._merge_warps(batch),
                score_scale=kv.k_scale * sm_scale * math.log2(math.e),
                value_scale=kv.v_scale,
            )
            launch = self._library.paged_decode
            self._check(launch(ctypes.byref(arguments), self._max_batch, ctypes.c_void_p(stream)))
        return out_BHD

    def _merge_warps(self, batch: int) -> int:
        """Return how many warps add up the partial results of a request."""
        parts = (self._ctas // batch + 1) * self._shares
        return max(1, min(32, parts // _WARP_PARTS))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the FP4 decode kernel was not launched: CUDA error {code}")


def check_shape(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Check what the kernel takes.

    Raises:
        ValueError: it does not take the shape.
    """
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"FP4 decode attention takes head sizes {HEAD_DIMS}, not {head_dim}")
    if num_q_heads % num_kv_heads or not 1 <= num_q_heads // num_kv_heads <= MAX_GROUP:
        raise ValueError(
            f"FP4 decode attention takes 1 to {MAX_GROUP} query heads a KV head, "
            f"not {num_q_heads} on {num_kv_heads}"
        )


def _is_long(numbers: Tensor) -> bool:
    assert numbers.dtype in (torch.int32, torch.int64)
    assert numbers.is_contiguous()
    return numbers.dtype == torch.int64
