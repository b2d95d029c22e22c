"""Bytes that a model and a cache really hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from localkv import LLM
from localkv.cache.kv_cache import KVCache


def storages(cache: KVCache, side: str) -> int:
    """Bytes that are allocated for one side, in NumPy's arrays or torch's."""
    planes = [p for layer in cache.layers for s in layer.segments for p in getattr(s, side)]
    return sum({_start(plane): plane.nbytes for plane in planes}.values())


def _start(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()


def parts(value: Any) -> Iterator[Any]:
    """All tensors and packed tensors in nested dataclasses and tuples."""
    if hasattr(value, "nbytes") or hasattr(value, "reads_rows"):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from parts(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))


def held(llm: LLM) -> tuple[int, int]:
    """Bytes of weights that lie in the mapped file, and of those that do not, each once."""
    if llm.backend.late is not None:
        llm.backend.late.finish()
    first = min(llm.gguf.data(name).ctypes.data for name in llm.gguf.tensors)
    places: dict[int, int] = {}
    copied = 0
    for part in parts(llm.engine.model.weights):
        if hasattr(part, "nbytes"):
            places[_start(part)] = part.nbytes
        elif part.reads_rows:
            places[part.rows.ctypes.data] = part.n_bytes
        else:
            copied += part.panels.nbytes
    mapped = 0
    for place, n_bytes in places.items():
        if first <= place < first + llm.gguf.file_bytes:
            mapped += n_bytes
        else:
            copied += n_bytes
    return mapped, copied
