"""How products are divided: guesses from instruction counts and register use, not measured ones.

Their requirements are tested for every GPU generation: no spilled registers, shared memory that
the smallest of them has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from localkv.kernels.gpu.device import GpuInfo, gpu_info

INTERPRETER = GpuInfo(arch=80, n_processors=1, ptx=False, name="Triton's interpreter")
"""Triton's interpreter, on tensors of a CPU."""


@cache
def gpu_of(device: torch.device) -> GpuInfo:
    """The facts about `device`, asked for once."""
    return gpu_info(device) if device.type == "cuda" else INTERPRETER


def wants_fence(gpu: GpuInfo) -> bool:
    """Whether decoded tiles need it (`triton_primitives.unpack.fence`).

    Generations 10 and 11 keep operands in a memory of their own, and Triton up to 3.7 can't
    pipeline a loop that has a fence there.
    """
    return gpu.ptx and gpu.arch // 10 not in (10, 11)


@dataclass(frozen=True)
class TileSizes:
    """A program's share of a product.

    Attributes:
        tokens, rows: of the output; one token at a time is multiplied without tensor cores.
        values: of a step along a row.
        n_warps, stages: warps of a program, and steps whose loads are under way.
        n_splits: programs that share a row; their results are added up afterwards.
    """

    tokens: int
    rows: int
    values: int
    n_warps: int
    stages: int
    n_splits: int = 1


def single_token_sizes(n_out: int, n_in: int, unit: int, n_processors: int) -> TileSizes:
    """For one token: each thread loads a run of codes of some rows at a time."""
    rows = 8
    while rows > 4 and triton.cdiv(n_out, rows) < 2 * n_processors:
        rows //= 2
    # with few programs, steps are shorter, so that rows can be split among more
    many = triton.cdiv(n_out, rows) >= n_processors
    most = 2048 if unit > 64 or (unit > 8 and many) else 1024
    values = max(unit, min(most, int(triton.next_power_of_2(n_in))))
    values = max(values, 32 // rows * unit)  # a unit for each thread of a warp
    n_warps = max(1, min(4, rows * values // unit // 32))
    n_splits = _splits(triton.cdiv(n_out, rows), n_in, values, n_processors)
    return TileSizes(1, rows, values, n_warps, 1, n_splits)


def tile_sizes(
    n_tokens: int,
    n_out: int,
    n_in: int,
    unit: int,
    n_processors: int,
    *,
    exact: bool,
    alone: bool,
    looks_up: bool = False,
) -> TileSizes:
    """For any number of tokens.

    Args:
        unit: the largest of the weights' (`WeightLayout.unit`).
        exact: activations are fp32.
        alone: a kernel multiplies with one matrix. With several it needs more registers.
        looks_up: a type has a table. Its entries are under way in registers, and a thread has to
            hold whole ones: there are at least as many units of 64 in a tile as threads.
    """
    if n_tokens == 1:
        return single_token_sizes(n_out, n_in, unit, n_processors)
    if exact:
        sizes = TileSizes(16, 32, max(unit, 256 if looks_up else 64), 4, 1)
    elif n_tokens <= 32:
        tokens = max(8, triton.next_power_of_2(n_tokens))
        sizes = TileSizes(tokens, 64, max(2 * unit, 128), 4, 2 if unit > 64 else 3)
    elif unit > 128:
        sizes = TileSizes(32, 64, 2 * unit, 4, 2)
    elif not alone and unit > 64:
        sizes = TileSizes(32, 128, 128, 4, 2)
    elif not alone:
        sizes = TileSizes(64, 128, max(2 * unit, 64), 8, 2)
    elif n_tokens <= 64 or unit > 32:
        n_warps = 8 if looks_up else 4
        sizes = TileSizes(64, 128, 128 if unit > 32 else 64, n_warps, 2 if unit > 32 else 3)
    else:
        sizes = TileSizes(128, 128, 64, 8, 3)
    tiles = triton.cdiv(n_tokens, sizes.tokens) * triton.cdiv(n_out, sizes.rows)
    n_splits = _splits(tiles, n_in, sizes.values, n_processors)
    return TileSizes(sizes.tokens, sizes.rows, sizes.values, sizes.n_warps, sizes.stages, n_splits)


def _splits(n_tiles: int, n_in: int, values: int, n_processors: int) -> int:
    """Halve rows until every multiprocessor has a program, or each program too little to do."""
    n_splits = 1
    while n_tiles * n_splits < n_processors and n_in >= 4 * values * n_splits:
        n_splits *= 2
    return n_splits
