"""Torch primitives from which the formats are made: bit fields, scales, codebooks.

They work on planes as `base.split_blocks` makes them: uint8 [..., n_blocks, plane bytes], views
with any strides and any storage offset, on any device. This file does not know any format's layout
beyond the parts that two of them share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

IQ4_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen values of iq4_nl and iq4_xs (ggml's `kvalues_iq4nl`)."""


def bit_fields(packed: Tensor, n_bits: int, run: int) -> Tensor:
    """Unpack unsigned fields of `n_bits` bits (1, 2 or 4).

    ggml packs a run of values into the lowest bits of `run` bytes, the next run of values into the
    next bits of the same bytes, and so on; then come the next `run` bytes.

    Args:
        packed: uint8 [..., n_bytes], n_bytes a multiple of `run`.

    Returns:
        uint8 [..., n_bytes * 8 / n_bits] in the order of the values.
    """
    mask = (1 << n_bits) - 1
    runs = packed.view(*packed.shape[:-1], packed.shape[-1] // run, run)
    fields = [runs & mask]
    fields += [(runs >> shift) & mask for shift in range(n_bits, 8 - n_bits, n_bits)]
    fields += [runs >> (8 - n_bits)]
    return torch.stack(fields, dim=-2).flatten(-3)


def pack_bits(codes: Tensor, n_bits: int, run: int) -> Tensor:
    """The inverse of `bit_fields`, for codes below 2 ** n_bits.

    Args:
        codes: uint8 [..., n], n a multiple of `run * 8 / n_bits`.

    Returns:
        uint8 [..., n * n_bits / 8].
    """
    n_fields = 8 // n_bits
    n_runs = codes.shape[-1] // (run * n_fields)
    fields = codes.view(*codes.shape[:-1], n_runs, n_fields, run)
    packed = fields[..., 0, :]
    for i in range(1, n_fields):
        packed = packed | (fields[..., i, :] << (i * n_bits))
    return packed.flatten(-2)


def less(codes: Tensor, offset: int) -> Tensor:
    """`codes - offset` of small unsigned codes, in place: uint8 -> int8, same shape."""
    return codes.sub_(offset).view(torch.int8)


def reinterpret(plane: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of a plane as `dtype` [..., n_blocks, values]; a view where torch allows one."""
    if not plane.is_contiguous() or plane.storage_offset() % dtype.itemsize:
        plane = plane.clone(memory_format=torch.contiguous_format)
    return plane.view(dtype)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of each value, as a plane: [..., n] -> uint8 [..., n, bytes of a value]."""
    data = values.contiguous().view(torch.uint8)
    return data.view(*values.shape, values.element_size())


def half(plane: Tensor) -> Tensor:
    """fp16 values as float32: uint8 [..., n_blocks, 2 n] -> [..., n_blocks, n]."""
    return reinterpret(plane, torch.float16).to(torch.float32)


def half_bytes(values: Tensor) -> Tensor:
    """The inverse of `half`, one value a block: float32 [..., n_blocks, 1] -> uint8 [..., 2]."""
    return values.to(torch.float16).view(torch.uint8)


def scaled(codes: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """`codes * scale - minimum` in float32, each product and difference rounded once, as ggml does.

    Args:
        codes: integers [..., n_blocks, block size].
        scale, minimum: float32 [..., n_blocks, n], one for each of n equal groups of a block.

    Returns:
        float32 [..., n_blocks * block size].
    """
    n_groups = scale.shape[-1]
    groups = codes.view(*codes.shape[:-1], n_groups, codes.shape[-1] // n_groups)
    values = groups.to(torch.float32).mul_(scale.unsqueeze(-1))
    if minimum is not None:
        values.sub_(minimum.unsqueeze(-1))
    return values.flatten(-3)


def iq4_values(qs: Tensor) -> Tensor:
    """The values of 4-bit codes in runs of 16: uint8 [..., n_bytes] -> int8 [..., 2 n_bytes]."""
    codes = bit_fields(qs, n_bits=4, run=16)
    codebook = torch.tensor(IQ4_CODEBOOK, dtype=torch.int8, device=qs.device)
    return codebook.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def q4_k_codes(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and minima of a q4_K or q5_K block (ggml's `get_scale_min_k4`).

    Scale and minimum j have 6 bits. For j < 4 they are the low bits of bytes j and j + 4; for
    j >= 4 their low 4 bits are the nibbles of byte j + 4, and their high 2 bits lie above the scale
    and the minimum of j - 4.

    Args:
        scales: uint8 [..., n_blocks, 12].

    Returns:
        uint8 [..., n_blocks, 8] each.
    """
    low, high, nibbles = scales[..., 0:4], scales[..., 4:8], scales[..., 8:12]
    scale = torch.cat([low & 63, (nibbles & 15) | ((low >> 6) << 4)], dim=-1)
    minimum = torch.cat([high & 63, (nibbles >> 4) | ((high >> 6) << 4)], dim=-1)
    return scale, minimum


def q4_k_scales(planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The factors and subtrahends of the eight groups of a q4_K or q5_K block.

    Args:
        planes: d, dmin (fp16) and scales (12 bytes) first; others are ignored.

    Returns:
        d * scale and dmin * minimum, float32 [..., n_blocks, 8] each.
    """
    d, dmin, scales = planes[:3]
    scale, minimum = q4_k_codes(scales)
    return half(d) * scale, half(dmin) * minimum


def q3_k_codes(scales: Tensor) -> Tensor:
    """The sixteen scales of a q3_K block, plus 32: uint8 [..., n_blocks, 12] -> [..., 16].

    The low 4 bits are in the first 8 bytes, the high 2 in the last 4.
    """
    low = bit_fields(scales[..., :8], n_bits=4, run=8)
    return low | (bit_fields(scales[..., 8:], n_bits=2, run=4) << 4)


def iq4_xs_codes(scales_h: Tensor, scales_l: Tensor) -> Tensor:
    """The eight scales of an iq4_xs block, plus 32: uint8 [..., n_blocks, 8]."""
    low = bit_fields(scales_l, n_bits=4, run=1)
    return low | (bit_fields(scales_h, n_bits=2, run=1) << 4)
