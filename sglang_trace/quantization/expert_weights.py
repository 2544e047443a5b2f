"""One layer's expert matrices in NVFP4, quantized the moment each is loaded.

Gate, up and down of an expert have a scale each and the loader hands every one over whole, so a
matrix needs no other to be quantized. No BF16 copy stays in memory, any order and any subset of
matrices is right, and nothing is left to do after an update. Every tensor keeps its address for
the life of the engine: CUDA graphs have recorded it.

A tensor-parallel rank holds a part of every expert's width. It too is handed whole matrices, and
quantizes them whole before it takes its part: the scale is that of the matrix, on every rank and in
the trainer, and so is the digest.

Shape legend: E experts, H hidden size, I expert width (this rank's part of it), O, N out and in
features of a whole matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bridge.errors import TraceError
from bridge.fp4.digest import digest, digest_packed
from bridge.fp4.nvfp4 import NVFP4_BLOCK, Fp4Tensor, pack_nibbles, quantize_weight, unpack_nibbles

if TYPE_CHECKING:
    from sglang_trace.kernels.moe import ExpertWeights

# SGLang's shard ids.
PROJECTIONS = {"w1": "gate", "w3": "up", "w2": "down"}
UNQUANTIZED = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
# What SGLang fills dummy weights with.
DUMMY_RANGE = 1e-3


class ExpertsNotLoaded(TraceError):
    """Some expert matrices are not what the checkpoint or the update holds."""


@dataclass(frozen=True)
class WidthPart:
    """Part `rank` of `size` equal parts of every expert's width."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether there is one part only."""
        return self.size == 1

    def of(self, fp4: Fp4Tensor, projection: str) -> Fp4Tensor:
        """Return this part of a whole matrix: rows of gate and up, columns of down."""
        if projection != "down":
            first, last = self._bounds(len(fp4.codes_u8))
            codes, scales = fp4.codes_u8[first:last], fp4.scales_u8[first:last]
        else:
            first, last = self._bounds(fp4.codes_u8.shape[1])
            blocks = slice(first // NVFP4_BLOCK, last // NVFP4_BLOCK)
            codes, scales = fp4.codes_u8[:, first:last], fp4.scales_u8[:, blocks].contiguous()
        return Fp4Tensor(codes, scales, fp4.global_scale, NVFP4_BLOCK)

    def _bounds(self, width: int) -> tuple[int, int]:
        return self.rank * width // self.size, (self.rank + 1) * width // self.size


WHOLE = WidthPart()


class Experts:
    """The tensors of a layer and how they are filled.

    Registered with the layer, all on its device:
        w13_weight [E, 2I, H/2], w2_weight [E, H, I/2]     uint8 parameters, two code words a byte
        w13_scales [E, 2I, H/16], w2_scales [E, H, I/16]   uint8, E4M3
        gate_scale, up_scale, down_scale [E]               float32 powers of two, one a matrix
    and on a CPU, which has no kernels that take code words, the same numbers once more:
        w13_hat [E, 2I, H], w2_hat [E, H, I]               float32, in which its GEMMs are fastest
    """

    def __init__(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        part: WidthPart = WHOLE,
    ) -> None:
        self._layer: Any = layer
        self._hidden, self._width, self._part = hidden, width, part
        # Of whole matrices, where this rank holds parts of them.
        self._digests: dict[tuple[int, str], str] = {}
        self._dtype = dtype
        self.count = num_experts
        self.loaded: set[tuple[int, str]] = set()
        # Loaded since `take_changed`.
        self._changed: set[tuple[int, str]] = set()
        self._register("w13", 2 * width, hidden)
        self._register("w2", hidden, width)
        for name in PROJECTIONS.values():
            layer.register_buffer(f"{name}_scale", torch.ones(num_experts, dtype=torch.float32))
        self._addresses = self._addresses_now()

    def _register(self, stack: str, out: int, into: int) -> None:
        def empty(width: int) -> Tensor:
            return torch.zeros((self.count, out, width), dtype=torch.uint8)

        codes = nn.Parameter(empty(into // 2), requires_grad=False)
        self._layer.register_parameter(f"{stack}_weight", codes)
        self._layer.register_buffer(f"{stack}_scales", empty(into // NVFP4_BLOCK))
        if not self.on_gpu:
            hat = torch.zeros((self.count, out, into), dtype=torch.float32)
            self._layer.register_buffer(f"{stack}_hat", hat, persistent=False)

    @property
    def on_gpu(self) -> bool:
        """Whether the matrices are multiplied as code words, by `sglang_trace.kernels`."""
        return bool(self._layer.w13_weight.is_cuda)

    # --- filling

    def weight_loader(
        self,
        param: Tensor,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        """Take one matrix [O, N] of a checkpoint or an update: what SGLang calls.

        Raises:
            ExpertsNotLoaded: it is quantized, or not a whole matrix of an expert of this layer.
        """
        if loaded_weight.dtype not in UNQUANTIZED:
            raise ExpertsNotLoaded(
                f"{weight_name} is of {loaded_weight.dtype}, so it is quantized already and its "
                "numbers mean nothing without scales; serve and send weights in BF16."
            )
        projection = PROJECTIONS[shard_id]
        if expert_id >= self.count or loaded_weight.shape != self._whole_shape(projection):
            raise ExpertsNotLoaded(
                f"{weight_name} {tuple(loaded_weight.shape)} is not a whole matrix of one of this "
                f"layer's {self.count} experts: serve the model without --ep-size and from a "
                "checkpoint that is not split."
            )
        self.load(expert_id, projection, loaded_weight)

    def load(self, expert: int, projection: str, matrix_ON: Tensor) -> None:
        """Quantize one matrix into its place."""
        place = self._place(projection, expert)
        packed, scales, global_scale = place
        matrix_ON = matrix_ON.to(device=packed.device, dtype=self._dtype)
        if self.on_gpu:
            from sglang_trace.kernels.nvfp4 import quantize_weights

            quantize_weights(matrix_ON[None], packed[None], scales[None], global_scale[None])
        else:
            whole = quantize_weight(matrix_ON)
            if not self._part.is_whole:
                self._digests[expert, projection] = digest(whole)
            fp4 = self._part.of(whole, projection)
            packed.copy_(pack_nibbles(fp4.codes_u8))
            scales.copy_(fp4.scales_u8)
            global_scale.copy_(fp4.global_scale)
            self._hat(projection, expert).copy_(fp4.dequantize(torch.float32))
        self.loaded.add((expert, projection))
        self._changed.add((expert, projection))

    def load_dummies(self) -> None:
        """Fill all matrices as `--load-format dummy` fills others."""
        generator = torch.Generator(self._layer.w13_weight.device).manual_seed(1234)
        for projection in PROJECTIONS.values():
            for expert in range(self.count):
                shape, device = self._whole_shape(projection), self._layer.w13_weight.device
                matrix_ON = torch.empty(shape, dtype=self._dtype, device=device)
                matrix_ON.uniform_(-DUMMY_RANGE, DUMMY_RANGE, generator=generator)
                self.load(expert, projection, matrix_ON)

    def check(self) -> None:
        """Check that every matrix has been loaded, and none of the tensors replaced.

        Raises:
            ExpertsNotLoaded: one was not.
        """
        missing = self.count * len(PROJECTIONS) - len(self.loaded)
        if missing:
            raise ExpertsNotLoaded(
                f"{missing} of {self.count * len(PROJECTIONS)} expert matrices of a layer were not "
                "in the checkpoint: serve one that is complete and in BF16."
            )
        if self._addresses_now() != self._addresses:
            raise ExpertsNotLoaded(
                "An update has put new tensors in the place of the experts', which CUDA graphs "
                "do not see: update with load_format auto, not direct, or restart the server."
            )

    # --- reading

    def take_changed(self) -> list[tuple[int, str]]:
        """Return (expert, projection) of every matrix loaded since the last call."""
        changed, self._changed = self._changed, set()
        return sorted(changed)

    def matrix(self, expert: int, projection: str) -> Fp4Tensor:
        """Return this rank's part of a matrix as it is stored."""
        packed, scales, global_scale = self._place(projection, expert)
        return Fp4Tensor(unpack_nibbles(packed), scales, global_scale, NVFP4_BLOCK)

    def digest(self, expert: int, projection: str) -> str:
        """Return the digest of a whole matrix; waits for the device."""
        if not self._part.is_whole:
            return self._digests[expert, projection]
        return digest_packed(*self._place(projection, expert))

    def weights(self) -> ExpertWeights:
        """Return the tensors in the form that the kernels take."""
        from sglang_trace.kernels.moe import ExpertWeights

        layer = self._layer
        return ExpertWeights(
            layer.w13_weight,
            layer.w13_scales,
            layer.w2_weight,
            layer.w2_scales,
            layer.gate_scale,
            layer.up_scale,
            layer.down_scale,
        )

    def _whole_shape(self, projection: str) -> tuple[int, int]:
        width = self._width * self._part.size
        return (self._hidden, width) if projection == "down" else (width, self._hidden)

    def _place(self, projection: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of a matrix' code words, block scales and scale."""
        stack, rows = self._rows(projection)
        return (
            getattr(self._layer, f"{stack}_weight").data[expert, rows],
            getattr(self._layer, f"{stack}_scales")[expert, rows],
            getattr(self._layer, f"{projection}_scale")[expert],
        )

    def _hat(self, projection: str, expert: int) -> Tensor:
        stack, rows = self._rows(projection)
        hat: Tensor = getattr(self._layer, f"{stack}_hat")[expert, rows]
        return hat

    def _rows(self, projection: str) -> tuple[str, slice]:
        if projection == "down":
            return "w2", slice(None)
        first = 0 if projection == "gate" else self._width
        return "w13", slice(first, first + self._width)

    def _addresses_now(self) -> dict[str, int]:
        stacks = [f"{stack}_{kind}" for stack in ("w13", "w2") for kind in ("weight", "scales")]
        scales = [f"{name}_scale" for name in PROJECTIONS.values()]
        return {name: getattr(self._layer, name).data_ptr() for name in (*stacks, *scales)}
