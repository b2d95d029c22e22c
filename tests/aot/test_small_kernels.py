"""That Triton's compiler takes the small kernels, and that they spill nothing."""

from __future__ import annotations

from typing import Any

import pytest

from localkv.kernels.gpu.attention.decode import merge_kernel
from localkv.kernels.gpu.embedding import WIDTH, embed_kernel
from localkv.kernels.gpu.group_store import ROWS, rotate_kernel
from localkv.kernels.gpu.grouped_attention import ROWS as HEADS
from localkv.kernels.gpu.grouped_attention import gate_kernel
from localkv.kernels.gpu.moe import combine_kernel, route_kernel
from localkv.kernels.gpu.norm import norm_kernel
from localkv.kernels.gpu.products.activations import pack_rows_kernel, row_warps
from localkv.kernels.gpu.scan import columns_of, scan_kernel
from localkv.quant_formats import FORMATS, WEIGHT_FORMATS
from localkv.quant_formats.shared.gpu.weight_layout import weight_layout
from support.aot.aot_report import ARCHS, compile_kernel, gpus_in_turn, resources
from support.aot.product_builds import plane_types
from support.quick import quick

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
    assert resources(compiled)["STACK"] == 0


PLAIN = {"ROWS": 1, "N": N, "bias_ptr": None, "residual_ptr": None, "CENTRED": False}
ADDED = {name: value for name, value in PLAIN.items() if name != "residual_ptr"}
NORMS: dict[str, dict[str, Any]] = {
    "plain": {**PLAIN, "restore_ptr": None},
    "heads": {**PLAIN, "restore_ptr": None, "ROWS": 16, "N": 128},
    "packed": PLAIN,
    "added": {**ADDED, "restore_ptr": None},
    "centred": {"ROWS": 1, "N": N, "residual_ptr": None, "CENTRED": True},
}


@gpus_in_turn("rows", [*NORMS])
def test_norms(arch: int, rows: str) -> None:
    """Norms of rows and of heads."""
    constants = NORMS[rows]
    warps = row_warps(constants["ROWS"] * constants["N"])
    packed = {} if "restore_ptr" in constants else {"out_ptr": "*fp16"}
    check(norm_kernel, arch, constants, warps, **packed)


@gpus_in_turn("halves", [False, True])
def test_packing(arch: int, halves: bool) -> None:
    constants = {"ROWS": 1, "N": 4 * N, "HALVES": halves}
    check(pack_rows_kernel, arch, constants, row_warps(4 * N))


@gpus_in_turn("name", NAMES)
def test_embedding(arch: int, name: str) -> None:
    layout = weight_layout(FORMATS[name])
    constants = {"READ": layout.read, "UNIT": layout.unit, "VALUES": WIDTH, "WIDE": False}
    check(embed_kernel, arch, {**constants, "PTX": True}, 1, planes=plane_types(name))


ROUTING: dict[str, Any] = {"N": 128, "N_USED": 6, "USED": 8, "RENORMALISE": True}
UNGROUPED = {"N_GROUPS": 1, "N_GROUPS_USED": 1, "GROUPS": 1}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {**UNGROUPED, "GATING": "softmax", "bias_ptr": None},
    "chosen": {**UNGROUPED, "GATING": "softmax_of_chosen"},
    "grouped": {"N": 256, "GATING": "sigmoid", "N_GROUPS": 8, "N_GROUPS_USED": 4, "GROUPS": 8},
}


@gpus_in_turn("router", [*ROUTERS])
def test_routing(arch: int, router: str) -> None:
    check(route_kernel, arch, ROUTING | ROUTERS[router], 1)


@pytest.mark.parametrize("arch", quick(ARCHS, [90]))
def test_sums_of_experts(arch: int) -> None:
    check(combine_kernel, arch, {"N_USED": 8, "N": N}, row_warps(N))


@gpus_in_turn("sinks", [False, True])
def test_sums_of_splits(arch: int, sinks: bool) -> None:
    """Sums of a context's splits."""
    sizes = {"N_HEADS": 32, "SPLITS": 64, "HEAD_DIM": 128, "WIDTH": 128, "SINKS": sinks}
    check(merge_kernel, arch, sizes if sinks else {**sizes, "sinks_ptr": None}, 4)


@gpus_in_turn("head_dim,width,block", [(96, 128, 32), (512, 512, 512)])
def test_rotation(arch: int, head_dim: int, width: int, block: int) -> None:
    """Rotations of queries and outputs."""
    sizes = {"HEAD_DIM": head_dim, "WIDTH": width, "BLOCK": block, "N": ROWS}
    check(rotate_kernel, arch, sizes, 4)


GATES: dict[str, dict[str, Any]] = {
    "channels": {"HEAD_DIM": 256, "STRIDE": 512, "BY_HEAD": False, "SOFTPLUS": False},
    "heads": {"HEAD_DIM": 128, "STRIDE": 1, "BY_HEAD": True, "SOFTPLUS": False},
    "softplus": {"HEAD_DIM": 128, "STRIDE": 1, "BY_HEAD": True, "SOFTPLUS": True},
    "softplus of channels": {"HEAD_DIM": 128, "STRIDE": 256, "BY_HEAD": False, "SOFTPLUS": True},
}


@gpus_in_turn("gate", [*GATES])
def test_gate(arch: int, gate: str) -> None:
    constants = {**GATES[gate], "WIDTH": GATES[gate]["HEAD_DIM"], "ROWS": HEADS}
    check(gate_kernel, arch, constants, 4)


@gpus_in_turn("predicts,by_row", [(True, False), (False, False), (True, True)])
def test_scan(arch: int, predicts: bool, by_row: bool) -> None:
    """Memories of Qwen 3.5's size, of Granite 4's, and of Kimi Linear's."""
    rows, columns = (128, 128) if predicts else (128, 64)
    sizes = {"ROWS": rows, "N_ROWS": rows, "N_COLUMNS": columns, "BY_ROW": by_row}
    constants = {**sizes, "COLUMNS": columns_of(rows, columns)}
    if not predicts:
        constants["beta_ptr"] = None
    integers = {"start_ptr": "*i32", "slot_ptr": "*i64", "n_heads": "i32", "slot_stride": "i32"}
    check(scan_kernel, arch, constants, 4, **integers)
