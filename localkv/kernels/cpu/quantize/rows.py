"""Rows of floats become rows of a type of weights, with the bytes that llama.cpp makes of them."""

from __future__ import annotations

import functools
from array import array
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.cpu.arrays import address
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.runtime.thread_pool import run_alone
from localkv.quant_formats.base import QuantFormat
from localkv.simd import LANES

Floats = NDArray[np.float32]
SCRATCH_BYTES = 1 << 17
"""More than any type's encoder needs."""


class EncodeJob(NamedTuple):
    """Rows to be encoded.

    Attributes:
        n_rows, n_in: at least 16 rows, of whole blocks.
        x: float32 [n_rows, n_in].
        importance: float32 [n_in], or 0.
        out, row_bytes: where the rows go, and how long one is.
        table: what the type's encoder looks things up in, or 0.
        scratch: memory of `SCRATCH_BYTES`.
    """

    n_rows: int
    n_in: int
    x: int
    importance: int
    out: int
    row_bytes: int
    table: int
    scratch: int


ONLY_WEIGHTED = ("iq1_s", "iq2_xs", "iq2_xxs")
"""Types that need importance."""


def encode_source(fmt: QuantFormat, *, weighted: bool) -> KernelSource:
    """The kernel for a type, with or without importance."""
    return KernelSource("quantize/encode_rows", {"FORMAT": fmt.name, "WEIGHTED": int(weighted)})


@functools.cache
def _worker(name: str, weighted: bool) -> int:
    from localkv.quant_formats import FORMATS

    return specialized(encode_source(FORMATS[name], weighted=weighted))["worker"]


@functools.cache
def _table(fmt: QuantFormat) -> NDArray[Any] | None:
    """What a type's encoder looks things up in: `quantizing_table` of its reference makes it, or,
    for a type with a grid, `neighbours.py`."""
    if fmt.has_part("neighbours"):
        return cast("NDArray[Any]", fmt.part("neighbours").table())
    make = getattr(fmt.codec, "quantizing_table", None)
    return None if make is None else cast("NDArray[Any]", make())


def encode_rows(fmt: QuantFormat, x: Floats, importance: Floats | None = None) -> NDArray[np.uint8]:
    """Encode rows on this thread, without the interpreter's lock.

    Args:
        x: float32 [n_rows, n_in], finite.
        importance: float32 [n_in], how much errors of each column count; None for equally.

    Returns:
        uint8 [n_rows, bytes of a row].
    """
    n_rows, n_in = x.shape
    if n_rows < LANES:
        x = np.pad(x, [(0, LANES - n_rows), (0, 0)])
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty((len(x), fmt.row_bytes(n_in)), np.uint8)
    scratch = np.empty(SCRATCH_BYTES + 64, np.uint8)
    table = _table(fmt)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    job = EncodeJob(
        n_rows=len(x),
        n_in=n_in,
        x=address(x),
        importance=0 if weights is None else address(weights),
        out=address(out),
        row_bytes=out.shape[1],
        table=0 if table is None else address(table),
        scratch=(address(scratch) + 63) // 64 * 64,
    )
    items = array("q", job)
    run_alone(_worker(fmt.name, weights is not None), items.buffer_info()[0])
    return out[:n_rows]
