"""Product kernels as their launchers would have them compiled, on a matrix of ordinary size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from localkv.arch.spec import Activation, MlpSpec
from localkv.kernels.gpu.device import GpuInfo
from localkv.kernels.gpu.moe import experts_down_kernel, experts_gate_up_kernel
from localkv.kernels.gpu.products.epilogues import PLAIN, epilogue
from localkv.kernels.gpu.products.products import gate_up_kernel, linear_kernel
from localkv.kernels.gpu.products.tile_sizes import TileSizes, tile_sizes, wants_fence
from localkv.quant_formats import FORMATS
from localkv.quant_formats.shared.gpu.weight_layout import WeightLayout, tables_on, weight_layout
from support.aot.aot_report import Report, compile_kernel, report

N_IN = N_OUT = 4096
N_PROCESSORS = 100
ALIGNED = ("n_in", "n_rows", "stack_rows", "up_start", "a_rows", "b_rows", "c_rows", "split_stride")
TYPES = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.uint16: "*u16",
    torch.int32: "*i32",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
}


@dataclass(frozen=True)
class Build:
    """A compiled kernel.

    Attributes:
        arch: compute capability that it is compiled for.
        code_bytes: that a thread loads of code planes in a step.
        run_bytes: of the contiguous codes, by tensor of a tile, that a thread loads together.
        looks_up: the first of the types has a table.
        holds_entries: threads hold the 4 or 8 bytes of an entry in order, as their PTX takes them.
    """

    arch: int
    report: Report
    sizes: TileSizes
    code_bytes: float
    run_bytes: tuple[int, ...]
    looks_up: bool
    holds_entries: bool

    @property
    def instructions_per_weight(self) -> float:
        """The instructions of the main loop, counted for threads."""
        threads = 32 * self.sizes.n_warps
        return self.report.n_loop * threads / (self.sizes.rows * self.sizes.values)


def plane_types(name: str) -> tuple[str, ...]:
    """Triton's types of the pointers to a format's planes."""
    tables = tables_on(torch.device("cpu"), weight_layout(FORMATS[name]))
    return tuple(TYPES[plane.dtype] for plane in (*_planes(name), *tables))


@cache
def _planes(name: str) -> tuple[torch.Tensor, ...]:
    fmt = FORMATS[name]
    n_blocks = N_IN // fmt.block_size
    fields = [torch.zeros(1, n_blocks, plane.n_bytes, dtype=torch.uint8) for plane in fmt.planes]
    return weight_layout(fmt).planes(fields)


def _code_bytes(name: str, sizes: TileSizes) -> float:
    """That a thread loads in a step. Code planes hold bytes in runs of 16, or are the only one."""
    planes = _planes(name)
    codes = [p for p in planes if len(planes) == 1 or p.nbytes >= N_IN // 8]
    a_row = sum(p.nbytes for p in codes if p.dtype == torch.uint8 or len(planes) == 1)
    return a_row * sizes.values / N_IN * sizes.rows / (32 * sizes.n_warps)


def _run_bytes(ttgir: str) -> tuple[int, ...]:
    """What a thread loads together of tensors with three dimensions, which codes have."""
    layouts = dict(re.findall(r"(#blocked\d*) = .*sizePerThread = \[([\d, ]+)\]", ttgir))
    loads = re.findall(
        r"(?:tt\.load|async_copy_global_to_local).*tensor<\d+x\d+x\d+x!tt\.ptr<\w(\d+)>, (#\w+)>",
        ttgir,
    )
    return tuple(int(layouts[at].split(",")[-1]) * int(bits) // 8 for bits, at in loads)


def _holds_entries(ttgir: str) -> bool:
    """Whether all inline assembly on the bytes of entries has them in the order of a layout."""
    layouts = dict(re.findall(r"(#\w+) = #ttg\.(\w+<\{.*)", ttgir))
    used = re.findall(r"packed_element = \d+ : i32.*? : tensor<\d+x\d+x([48])xi8, (#\w+)>", ttgir)
    in_order = {4: "[0, 0, 1], [0, 0, 2]", 8: "[0, 0, 1], [0, 0, 2], [0, 0, 4]"}
    return all(
        re.match(rf"blocked.*sizePerThread = \[1, \d+, {n}\].*order = \[2,", layouts[at])
        or layouts[at].startswith(f"linear<{{register = [{in_order[int(n)]}")
        for n, at in used
    )


def _built(kernel: Any, arch: int, types: dict[str, Any], constants: dict[str, Any],
           sizes: TileSizes, names: Sequence[str]) -> Build:  # fmt: skip
    compiled = compile_kernel(
        kernel,
        arch,
        types,
        constants,
        num_warps=sizes.n_warps,
        num_stages=sizes.stages,
        aligned=[name for name in ALIGNED if name in types],
    )
    return Build(
        arch,
        report(compiled),
        sizes,
        _code_bytes(names[0], sizes),
        _run_bytes(compiled.asm["ttgir"]),
        weight_layout(FORMATS[names[0]]).table is not None,
        _holds_entries(compiled.asm["ttgir"]),
    )


def _sizes(
    names: Sequence[str], n_tokens: int, n_out: int = N_OUT, n_in: int = N_IN
) -> tuple[list[WeightLayout], TileSizes]:
    layouts = [weight_layout(FORMATS[name]) for name in names]
    exact = any(layout.is_exact for layout in layouts)
    unit = max(layout.unit for layout in layouts)
    return layouts, tile_sizes(
        n_tokens,
        n_out,
        n_in,
        unit,
        N_PROCESSORS,
        exact=exact,
        alone=len(names) == 1,
        looks_up=any(layout.table is not None for layout in layouts),
    )


def _common(arch: int, layouts: Sequence[WeightLayout], sizes: TileSizes) -> dict[str, Any]:
    gpu = GpuInfo(arch, N_PROCESSORS)
    reads_float32 = sizes.tokens == 1 or any(layout.is_exact for layout in layouts)
    return {
        **({"restore_ptr": None} if reads_float32 else {}),
        "ROWS": sizes.rows,
        "TOKENS": sizes.tokens,
        "VALUES": sizes.values,
        "EVEN": True,
        "HALVES": False,
        "WIDE": False,
        "STAGES": sizes.stages,
        "FENCE": wants_fence(gpu),
        "PTX": True,
    }


def _x_types(constants: dict[str, Any]) -> dict[str, str]:
    narrow = "restore_ptr" not in constants
    return {"x_ptr": "*fp16" if narrow else "*fp32", "restore_ptr": "*fp32"}


@cache
def linear_build(
    arch: int,
    names: tuple[str, ...],
    n_tokens: int,
    n_out: int = N_OUT,
    n_in: int = N_IN,
    wide: bool = False,
    epilogue: bool = False,
    activation: Activation | None = None,
) -> Build:
    """`linear_kernel` for one to three matrices in formats `names`.

    Args:
        epilogue: with biases and a residual, and with activations that are halved.
        activation: of a block without a gate.
    """
    layouts, sizes = _sizes(names, n_tokens, n_out, n_in)
    constants = {**_common(arch, layouts, sizes), "WIDE": wide, "HALVES": epilogue}
    constants |= {} if epilogue else {"residual_ptr": None}
    constants["ACTIVATION"] = None if activation is None else PLAIN[activation]
    constants["EVEN"] = n_in % sizes.values == 0
    types: dict[str, Any] = {
        **_x_types(constants),
        **dict.fromkeys(("n_tokens", "n_in", "split_stride"), "i32"),
        **dict.fromkeys(("out_ptr", "residual_ptr"), "*fp32"),
        "numbers": ("fp32",) * (4 if activation == "xielu" else 0),
    }
    for i, key in enumerate("abc"):
        if epilogue and i < len(names):
            types[f"{key}_bias_ptr"] = "*fp32"
        else:
            constants[f"{key}_bias_ptr"] = None
        constants[key.upper()] = layouts[i].read if i < len(names) else None
        constants[f"{key.upper()}_UNIT"] = layouts[i].unit if i < len(names) else None
        if i < len(names):
            types |= {f"{key}_planes": plane_types(names[i])}
            types |= {f"{key}_scale": "fp32", f"{key}_rows": "i32"}
        else:
            constants |= dict.fromkeys((f"{key}_planes", f"{key}_scale", f"{key}_rows"))
    return _built(linear_kernel, arch, types, constants, sizes, names)


PLAIN_BLOCK = MlpSpec(N_OUT)


@cache
def gate_up_build(
    arch: int,
    name: str,
    n_tokens: int,
    *,
    routed: bool,
    split: bool = False,
    block: MlpSpec = PLAIN_BLOCK,
    biased: bool = False,
) -> Build:
    """`gate_up_kernel`, or the one for routed experts, sorted where there are many tokens."""
    layouts, sizes = _sizes((name, name), n_tokens)
    constants = {
        **_common(arch, layouts, sizes),
        "GATE": layouts[0].read,
        "GATE_UNIT": layouts[0].unit,
        "UP": layouts[0].read,
        "UP_UNIT": layouts[0].unit,
    }
    types: dict[str, Any] = {
        **_x_types(constants),
        **dict.fromkeys(("n_tokens", "n_in", "n_rows", "n_experts", "split_stride"), "i32"),
        **dict.fromkeys(("gate_planes", "up_planes"), plane_types(name)),
        **dict.fromkeys(("gate_scale", "up_scale"), "fp32"),
        "out_ptr": "*fp32",
        "numbers": ("fp32",) * bool(block.limit),
    }
    if routed:
        constants |= {"N_USED": 8, "ACTIVATION": epilogue(block)}
        absent = () if biased else ("gate_bias_ptr", "up_bias_ptr")
        constants |= dict.fromkeys((*absent, "weights_ptr"))
        types |= dict.fromkeys(("stack_rows", "up_start"), "i32")
        types |= dict.fromkeys(("gate_bias_ptr", "up_bias_ptr"), "*fp32")
        types |= _pair_types(constants, n_tokens)
        return _built(experts_gate_up_kernel, arch, types, constants, sizes, (name,))
    constants |= {"gate_bias_ptr": None, "up_bias_ptr": None, "SPLIT": split}
    constants["ACTIVATION"] = epilogue(block)
    return _built(gate_up_kernel, arch, types, constants, sizes, (name,))


@cache
def experts_down_build(arch: int, name: str, n_tokens: int, *, biased: bool = False) -> Build:
    layouts, sizes = _sizes((name,), n_tokens)
    constants = {
        **_common(arch, layouts, sizes),
        "DOWN": layouts[0].read,
        "DOWN_UNIT": layouts[0].unit,
        **({} if biased else {"bias_ptr": None}),
        "expert_scale_ptr": None,
    }
    types: dict[str, Any] = {
        **_x_types(constants),
        **dict.fromkeys(("n_experts", "n_in", "n_rows"), "i32"),
        **dict.fromkeys(("out_ptr", "weights_ptr", "bias_ptr"), "*fp32"),
        "planes": plane_types(name),
        "w_scale": "fp32",
    }
    types |= _pair_types(constants, n_tokens)
    return _built(experts_down_kernel, arch, types, constants, sizes, (name,))


def _pair_types(constants: dict[str, Any], n_tokens: int) -> dict[str, str]:
    tables = ("first_ptr", "end_ptr", "order_ptr")
    if n_tokens == 1:
        constants |= dict.fromkeys(tables)
    return dict.fromkeys(("expert_ptr", *tables), "*i32")
