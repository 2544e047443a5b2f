"""Our FP4 arithmetic equals compressed-tensors 0.18, an implementation that shares no code with it.

Where other implementations do not agree with round-to-nearest, ties to the even code:

- compressed-tensors agrees on every tie, scale and code word if it is given float32. It drops the
  sign of -0.0, replaces a block scale of zero by 0.125, computes in the input's dtype (with BF16
  input and a scale that is no power of two about one code word in 150 differs), and takes the MXFP4
  scale that rounds to the nearest power of two, so it may saturate where ours never does.
- torchao 0.18 agrees on E2M1 for every BF16 number and on MXFP4 in its RCEIL mode. Its
  `nvfp4_quantize` multiplies by a rounded reciprocal of the scale: BF16 input sits on ties often
  enough that about one byte of packed code words in 800 differs. It also never uses a block scale
  below 2^-6.
- SGLang's block-16 FP4 KV path counts `|x| >= bound`: ties go up, not to even.
"""

# ruff: noqa: E402 - the host must be prepared between the two groups of imports

import torch
from torch import Tensor

from bridge.fp4.nvfp4 import (
    Fp4Tensor,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    quantize_mxfp4,
    quantize_nvfp4,
    tensor_scale,
    unpack_nibbles,
)
from sglang_trace.preflight import cpu_host

# compressed-tensors imports transformers, and that imports torchvision if it is installed: a CUDA
# build beside a CPU build of torch fails unless the host is prepared.
cpu_host.prepare()

# ruff: isort: split
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.quant_args import round_to_quantized_type_dtype
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.helpers import calculate_qparams

NVFP4 = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    symmetric=True,
    scale_dtype=torch.float8_e4m3fn,
)


def finite_bf16() -> Tensor:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).to(torch.float32)
    return numbers[torch.isfinite(numbers)]


def activations(rows: int = 256) -> Tensor:
    """BF16 numbers, many of them on ties once scaled, whose size varies from row to row."""
    generator = torch.Generator().manual_seed(7)
    size = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator).float())
    return (torch.randn(rows, 1024, generator=generator) * size).to(torch.bfloat16)


def their_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return their packed code words and E4M3 scale bits; their global scale is the reciprocal."""
    blocks = x.unflatten(-1, (-1, 16))
    scales, zero_points = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), NVFP4, global_scale=1 / global_scale
    )
    values = quantize(x, scales, zero_points, NVFP4, global_scale=1 / global_scale)
    return pack_fp4_to_uint8(values), scales.to(torch.float8_e4m3fn).view(torch.uint8)


def on_ties(x: Tensor, ours: Fp4Tensor) -> Tensor:
    """Say which values lie exactly between two code words of the block's scale."""
    z = x.unflatten(-1, (-1, 16)) / ours.effective_scale().unsqueeze(-1)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    return torch.isin(z.abs(), midpoints).flatten(-2)


def test_e2m1_agrees_on_every_finite_bf16_number_and_on_every_tie() -> None:
    numbers = finite_bf16()
    assert torch.isin(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), numbers).all()
    assert torch.equal(decode_e2m1(encode_e2m1(numbers)), cast_to_fp4(numbers.clone()))


def test_packing_agrees_on_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).unsqueeze(0)
    values = decode_e2m1(unpack_nibbles(packed))
    assert torch.equal(pack_fp4_to_uint8(values), packed)
    assert torch.equal(unpack_fp4_from_uint8(packed, 1, 512, dtype=torch.float32), values)
    assert torch.equal(pack_nibbles(encode_e2m1(values)), packed)


def test_e4m3_agrees_on_every_finite_bf16_number() -> None:
    numbers = finite_bf16()
    theirs = round_to_quantized_type_dtype(numbers.clone(), dtype=torch.float8_e4m3fn)
    assert torch.equal(decode_e4m3(encode_e4m3(numbers)), theirs.to(torch.float32))


def test_nvfp4_agrees_on_scales_and_code_words_with_a_power_of_two_global_scale() -> None:
    x = activations().to(torch.float32)
    ours = quantize_nvfp4(x, tensor_scale(x))
    packed, scales_u8 = their_nvfp4(x, ours.global_scale)
    assert on_ties(x, ours).sum() > 100
    assert torch.equal(ours.scales_u8, scales_u8)
    assert torch.equal(pack_nibbles(ours.codes_u8), packed)


def test_nvfp4_agrees_where_every_block_scale_saturates() -> None:
    x = activations().to(torch.float32) + 1e4
    ours = quantize_nvfp4(x, torch.tensor(1.0))
    packed, scales_u8 = their_nvfp4(x, torch.tensor(1.0))
    assert (ours.scales_u8 == 0x7E).all()
    assert torch.equal(ours.scales_u8, scales_u8)
    assert torch.equal(pack_nibbles(ours.codes_u8), packed)


def test_nvfp4_agrees_on_subnormal_block_scales() -> None:
    x = activations().to(torch.float32)
    blocks = x.unflatten(-1, (-1, 16))
    # Block maxima between 6 * 2^-9 and 6 * 7 * 2^-9: every scale is a subnormal E4M3 number.
    wanted = torch.arange(1, 8).repeat(x.numel() // 16 // 7 + 1)[: x.numel() // 16]
    size = wanted.view(blocks.shape[:-1]) * 6 * 2.0**-9
    x = (blocks / blocks.abs().amax(-1, keepdim=True) * size.unsqueeze(-1)).flatten(-2)
    ours = quantize_nvfp4(x, torch.tensor(1.0))
    packed, scales_u8 = their_nvfp4(x, torch.tensor(1.0))
    assert set(ours.scales_u8.unique().tolist()) == set(range(1, 8))
    assert torch.equal(ours.scales_u8, scales_u8)
    assert torch.equal(pack_nibbles(ours.codes_u8), packed)


def test_mxfp4_code_words_agree_at_our_scales() -> None:
    x = activations().to(torch.float32)
    ours = quantize_mxfp4(x)
    z = (x.unflatten(-1, (-1, 32)) / ours.effective_scale().unsqueeze(-1)).flatten(-2)
    assert torch.equal(decode_e2m1(ours.codes_u8), cast_to_fp4(z))
