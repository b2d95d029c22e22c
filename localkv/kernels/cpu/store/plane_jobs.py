"""What workers are told of the planes of a type, and of the order of their bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.kernels.cpu.addresses import all_bytes
from localkv.kernels.cpu.runtime.chain import Memory
from localkv.kernels.cpu.store.job import PlaneJob
from localkv.quant_formats.base import QuantFormat


def _plane_job(plane: NDArray[np.uint8] | Any, order: tuple[int, int, int]) -> PlaneJob:
    pages = all_bytes(plane)
    row_bytes = plane.shape[3] * plane.shape[4]
    return PlaneJob(0, Memory(pages, pages.nbytes), row_bytes, plane.strides[0], *order)


@functools.cache
def orders(fmt: QuantFormat, side: str) -> tuple[tuple[int, int, int], ...]:
    """Of each plane on the side "k" or "v": the bits of an item, rows and columns
    (`shared/cpu/page_order.py`)."""
    found = [getattr(order, side) for order in fmt.cpu_layout.PLANES]
    return tuple(
        (*order, order.columns(plane.n_bytes))
        for order, plane in zip(found, fmt.all_planes, strict=True)
    )


def plane_jobs(
    fmt: QuantFormat, side: str, planes: Sequence[NDArray[np.uint8] | Any]
) -> list[PlaneJob]:
    """Of rows that are encoded on the way."""
    return [
        _plane_job(plane, order) for plane, order in zip(planes, orders(fmt, side), strict=True)
    ]
