"""That Triton's compiler takes the small kernels, and that they spill nothing."""

from __future__ import annotations

from typing import Any

import pytest

from localkv.formats import FORMATS, WEIGHT_FORMATS
from localkv.formats.gpu.weight_layout import weight_layout
from localkv.kernels.gpu.attention.merge import merge_kernel
from localkv.kernels.gpu.embedding import WIDTH, embed_kernel
from localkv.kernels.gpu.gate import ROWS as HEADS
from localkv.kernels.gpu.gate import gate_kernel
from localkv.kernels.gpu.moe.kernels import combine_kernel
from localkv.kernels.gpu.moe.route import route_kernel
from localkv.kernels.gpu.norm import norm_kernel
from localkv.kernels.gpu.products.activations import pack_rows_kernel, row_warps
from localkv.kernels.gpu.recurrent.scan import columns_of, scan_kernel
from localkv.kernels.gpu.rotate import ROWS, rotate_kernel
from support.aot.aot_report import compile_kernel, on_every_gpu, report, types_on_gpus
from support.aot.product_builds import plane_types
from support.quick import LIKE_OTHERS

N = 4096
NAMES = [fmt.name for fmt in WEIGHT_FORMATS.values()]
TYPES = {
    **dict.fromkeys(("eps", "factor", "weights_scale"), "fp32"),
    "ids_ptr": "*i64",
    "experts_ptr": "*i32",
    "values_ptr": "*fp16",
    **dict.fromkeys(("n", "n_rows", "n_experts", "n_splits"), "i32"),
}


def check(kernel: Any, arch: int, constants: dict[str, Any], n_warps: int, **types: Any) -> None:
    arguments = dict.fromkeys(kernel.arg_names, "*fp32") | TYPES | types
    compiled = compile_kernel(
        kernel,
        arch,
        arguments,
        constants,
        num_warps=n_warps,
        aligned=[n for n in ("n",) if n in kernel.arg_names],
    )
    assert report(compiled).stack_bytes == 0


@on_every_gpu
def test_rows(arch: int) -> None:
    """Norms of rows and of heads, and packing."""
    warps = row_warps(N)
    plain = {"ROWS": 1, "N": N, "restore_ptr": None, "bias_ptr": None, "residual_ptr": None}
    plain["CENTRED"] = False
    check(norm_kernel, arch, plain, warps)
    added = {name: value for name, value in plain.items() if name != "residual_ptr"}
    check(norm_kernel, arch, added, warps)
    check(norm_kernel, arch, {**plain, "ROWS": 16, "N": 128}, row_warps(2048))
    packed = {"ROWS": 1, "N": N, "bias_ptr": None, "residual_ptr": None, "CENTRED": False}
    check(norm_kernel, arch, packed, warps, out_ptr="*fp16")
    centred = {"ROWS": 1, "N": N, "residual_ptr": None, "CENTRED": True}
    check(norm_kernel, arch, centred, warps, out_ptr="*fp16")
    for halves in (False, True):
        constants = {"ROWS": 1, "N": 4 * N, "HALVES": halves}
        check(pack_rows_kernel, arch, constants, row_warps(4 * N))


SHORT = [name for name in NAMES if name not in LIKE_OTHERS]


@types_on_gpus(NAMES, (86, 90), ("f16", "q4_K", "iq3_s"), fast=SHORT)
def test_embedding(arch: int, name: str) -> None:
    layout = weight_layout(FORMATS[name])
    constants = {"READ": layout.read, "UNIT": layout.unit, "VALUES": WIDTH, "WIDE": False}
    check(embed_kernel, arch, {**constants, "PTX": True}, 1, planes=plane_types(name))


@on_every_gpu
def test_routing(arch: int) -> None:
    constants = {"N": 128, "N_USED": 6, "USED": 8, "GATING": "softmax", "RENORMALISE": True}
    ungrouped = {"N_GROUPS": 1, "N_GROUPS_USED": 1, "GROUPS": 1}
    check(route_kernel, arch, {**constants, **ungrouped, "bias_ptr": None}, 1)
    check(route_kernel, arch, {**constants, **ungrouped, "GATING": "softmax_of_chosen"}, 1)
    grouped = {"GATING": "sigmoid", "N_GROUPS": 8, "N_GROUPS_USED": 4, "GROUPS": 8}
    check(route_kernel, arch, {**constants, **grouped, "N": 256}, 1)
    check(combine_kernel, arch, {"N_USED": 8, "N": N}, row_warps(N))


@on_every_gpu
def test_around_attention(arch: int) -> None:
    """Adding up the splits of a context, rotating queries and outputs, a gate."""
    sizes = {"N_HEADS": 32, "SPLITS": 64, "HEAD_DIM": 128, "WIDTH": 128}
    check(merge_kernel, arch, {**sizes, "SINKS": False, "sinks_ptr": None}, 4)
    check(merge_kernel, arch, {**sizes, "SINKS": True}, 4)
    rotation = {"HEAD_DIM": 96, "WIDTH": 128, "BLOCK": 32, "N": ROWS}
    check(rotate_kernel, arch, {**rotation, "HEAD_DIM": 512, "WIDTH": 512, "BLOCK": 512}, 4)
    gate: dict[str, Any] = {"HEAD_DIM": 256, "WIDTH": 256, "STRIDE": 512, "ROWS": HEADS}
    check(gate_kernel, arch, gate, 4)
    check(rotate_kernel, arch, rotation, 4)


@pytest.mark.parametrize("predicts", [True, False])
@on_every_gpu
def test_scan(arch: int, predicts: bool) -> None:
    """Memories of Qwen 3.5's size, and of Granite 4's."""
    rows, columns = (128, 128) if predicts else (128, 64)
    sizes = {"ROWS": rows, "N_ROWS": rows, "N_COLUMNS": columns}
    constants = {**sizes, "COLUMNS": columns_of(rows, columns)}
    if not predicts:
        constants["beta_ptr"] = None
    integers = {"start_ptr": "*i32", "slot_ptr": "*i64", "n_heads": "i32", "slot_stride": "i32"}
    check(scan_kernel, arch, constants, 4, **integers)
