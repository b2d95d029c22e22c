"""Attention kernels, compiled as their launchers would launch them."""

from __future__ import annotations

from typing import Any

from localkv.kernels.gpu.attention.decode import decode_kernel
from localkv.kernels.gpu.attention.packed_attention import TileConfig, attention_constants, tiles_of
from localkv.kernels.gpu.attention.prefill import prefill_kernel
from localkv.quant_formats import FORMATS, QuantFormat
from support.aot.aot_report import compile_kernel

NUMBERS = {
    "first_position": "i32",
    "table_width": "i32",
    "scale": "fp32",
    "softcap": "fp32",
    "window": "i32",
}


def plane_types(fmt: QuantFormat) -> tuple[str, ...]:
    """The types of the planes that a type is encoded in, and of its codebook."""
    return ("*u8",) * len(fmt.all_planes) + ("*fp32",) * (fmt.n_centroids > 0)


def build(
    kernel: Any,
    arch: int,
    type_k: str,
    type_v: str,
    head_dim: int,
    *,
    value_dim: int | None = None,
    group: int = 4,
    n_new: int = 1,
    softcap: bool = False,
    window: int = 0,
    tail: int = 0,
    tiles: TileConfig | None = None,
    page_bytes: int = 0,
    alibi: bool = False,
    codes: bool = False,
) -> tuple[Any, TileConfig]:
    """The compiled kernel, and its tiles; V has heads as K unless `value_dim` says otherwise.
    With `page_bytes` sequences have positions of rows 0 of their own."""
    value_dim = value_dim or head_dim
    format_k, format_v = FORMATS[type_k], FORMATS[type_v]
    tiles = tiles or tiles_of(
        arch,
        max(head_dim, value_dim),
        format_k,
        format_v,
        group,
        n_new if kernel is decode_kernel else 0,
    )
    constants = attention_constants(
        format_k,
        format_v,
        n_kv_heads=8,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        tiles=tiles,
        softcap=softcap,
        window=window,
        ptx=True,
        tail=tail,
        tail_tokens=32 if tail else 1,
        page_bytes=page_bytes,
        codes=codes,
    )
    types = {
        **NUMBERS,
        "q_ptr": "*fp32",
        "k_planes": plane_types(format_k),
        "v_planes": plane_types(format_v),
        "page_table_ptr": "*i64",
        "lengths_ptr": "*i32",
        "starts_ptr": "*i32",
        "positions_ptr": "*i64",
        "out_ptr": "*fp32",
        "lse_ptr": "*fp32",
    }
    if alibi:
        types["slopes_ptr"] = "*fp32"
    else:
        constants["slopes_ptr"] = None
    if page_bytes:
        types["firsts_ptr"] = "*i64"
    else:
        constants["firsts_ptr"] = None
    if tail:
        types |= {"exact_ptr": "*i64", "tail_start": "i32", "tail_newest": "i32"}
    if kernel is prefill_kernel:
        constants |= {"SINKS": False, "sinks_ptr": None}
    compiled = compile_kernel(
        kernel, arch, types, constants, num_warps=tiles.warps, num_stages=tiles.stages
    )
    return compiled, tiles
