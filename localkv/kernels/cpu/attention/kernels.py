"""The compiled kernels of the CPU's attention by type, as addresses; each compiled on first use."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.parameters import Value
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.thread_pool import run_worker
from localkv.quant_formats import FORMATS
from localkv.simd import LANES
from localkv.simd.cpu_features import HAS_AVX512, HAS_BYTE_SHUFFLE, HAS_VNNI

MAX_ROWS = 8 if HAS_AVX512 else 4
"""Rows that decode kernels hold in registers at once."""


def rows_per_tile(group: int) -> int:
    """Rows in each of equal tiles, as few as can be, that hold a token's `group` rows.

    Several new tokens run with the kernels of one where those for other sizes of tiles add up in
    another order (`tile_of`).
    """
    return -(-group // -(-group // MAX_ROWS))


def tile_of(n_rows: int, group: int, *, adds_alike: bool) -> int:
    """Rows of the tiles that `n_rows` whole tiles of some tokens are cut into.

    Args:
        adds_alike: kernels for tiles of all sizes add up in one order, so the largest will do.
    """
    return MAX_ROWS if adds_alike and n_rows % MAX_ROWS == 0 else rows_per_tile(group)


def whole_tiles(n_rows: int, group: int) -> int:
    """The rows of as many tiles as `n_rows` take."""
    tile = rows_per_tile(group)
    return -(-n_rows // tile) * tile


@dataclass(frozen=True)
class CacheDecoder:
    """What a type says of its layout on the CPU (`shared/cpu/`).

    Attributes:
        block: values per block.
        affine: there are minima.
        by_channel: scales and minima belong to channels for some tokens, and kernels of such
            types multiply queries and make digits by themselves.
        digits: `score` takes queries, and `weigh` weights, as digits.
        offset: how much larger than values the codes are that they then read.
        outliers: some values of a row are kept on their own.
    """

    block: int
    affine: bool
    by_channel: bool
    digits: bool
    offset: int
    outliers: bool

    @property
    def adds_alike(self) -> bool:
        """Whether kernels add up a row in the same order in tiles of all sizes.

        They do where a unit is one vector of floats: even the largest tile of V then has two sums
        for each row (`weigh.PAIRS`).
        """
        return self.block == LANES and not (self.digits or self.by_channel or self.outliers)


@functools.cache
def cache_decoder(name: str) -> CacheDecoder:
    module, by_channel = FORMATS[name].cpu_layout, FORMATS[name].group_tokens > 1
    offset = getattr(module, "OFFSET", None)
    digits = HAS_VNNI and HAS_BYTE_SHUFFLE and offset is not None
    outliers = getattr(module, "OUTLIERS", 0) > 0
    return CacheDecoder(module.BLOCK, module.AFFINE, by_channel, digits, offset or 0, outliers)


def _type_parameters(name: str) -> dict[str, Value]:
    """What fits a template to a type: its decoder, and the planes of rows' scales and minima."""
    fmt = FORMATS[name]
    if fmt.group_tokens > 1:
        return {"FORMAT": fmt.codec_name}
    row_scales = len(fmt.planes) if fmt.row_planes else 0
    row_minima = row_scales + 1 if len(fmt.row_planes) > 1 else 0
    return {"FORMAT": fmt.codec_name, "ROW_SCALES": row_scales, "ROW_MINIMA": row_minima}


def _source(template: str, name: str, **parameters: Value) -> KernelSource:
    """A template, or the one for types with scales by channel, for a type."""
    if cache_decoder(name).by_channel:
        template += "_channels"
    return KernelSource(template, {**_type_parameters(name), **parameters})


def score_source(type_k: str, rows: int) -> KernelSource:
    return _source("attention/score", type_k, ROWS=rows, DIGITS=cache_decoder(type_k).digits)


def weigh_source(type_v: str, rows: int) -> KernelSource:
    return _source("attention/weigh", type_v, ROWS=rows, DIGITS=cache_decoder(type_v).digits)


def decode_k_source(type_k: str) -> KernelSource:
    return _source("attention/tiles", type_k, OF_V=False)


def decode_v_source(type_v: str) -> KernelSource:
    return _source("attention/tiles", type_v, OF_V=True)


def tiles_add_alike(type_k: str, type_v: str) -> bool:
    """Whether rows get the same bits from `score` and `weigh` in tiles of all sizes."""
    return cache_decoder(type_k).adds_alike and cache_decoder(type_v).adds_alike


def runs_in_blocks(type_k: str, type_v: str) -> bool:
    """Whether `attention/many.py` has the bits of `score` and `weigh`: values are floats
    without scales."""
    plain = not FORMATS[type_k].row_planes and not FORMATS[type_v].row_planes
    return plain and tiles_add_alike(type_k, type_v)


@functools.cache
def score_kernel(type_k: str, rows: int) -> int:
    return specialized(score_source(type_k, rows))["score"]


@functools.cache
def weigh_kernel(type_v: str, rows: int) -> int:
    return specialized(weigh_source(type_v, rows))["weigh"]


@functools.cache
def decode_k_kernel(type_k: str) -> int:
    return specialized(decode_k_source(type_k))["decode_tile"]


@functools.cache
def decode_v_kernel(type_v: str) -> int:
    return specialized(decode_v_source(type_v))["decode_tile"]


@functools.cache
def worker_of(template: str) -> int:
    """The address of a template's worker."""
    return specialized(KernelSource(template))["worker"]


def run(template: str, job: Sequence[int] | array[int], threads: int) -> None:
    """Run the worker of a template on some threads; it returns when the job is done."""
    items = job if isinstance(job, array) else array("q", job)
    run_worker(worker_of(template), items.buffer_info()[0], threads)
