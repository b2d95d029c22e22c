"""Bit fields of weights that are laid out anew on a GPU: `formats/bits.py` in torch.

Planes are uint8 [..., n_blocks, plane bytes], views with any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
