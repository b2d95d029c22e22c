"""Bytes that a model and a cache really hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from localkv import LLM
from localkv.cache.kv_cache import KVCache


def storages(cache: KVCache, side: str) -> int:
    """Bytes that torch has allocated for one side."""
    planes = [p for layer in cache.layers for s in layer.segments for p in getattr(s, side)]
    return sum(
        {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in planes}.values()
    )


def parts(value: Any) -> Iterator[Any]:
    """All tensors and packed tensors in nested dataclasses and tuples."""
    if isinstance(value, torch.Tensor) or hasattr(value, "reads_rows"):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from parts(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))


def held(llm: LLM) -> tuple[int, int]:
    """Bytes of weights that lie in the mapped file, and of those that do not, each once."""
    first = min(llm.gguf.data(name).ctypes.data for name in llm.gguf.tensors)
    places: dict[int, int] = {}
    copied = 0
    for part in parts(llm.engine.model.weights):
        if isinstance(part, torch.Tensor):
            places[part.data_ptr()] = part.nbytes
        elif part.reads_rows:
            places[part.rows.data_ptr()] = part.n_bytes
        else:
            copied += part.panels.nbytes
    mapped = 0
    for place, n_bytes in places.items():
        if first <= place < first + llm.gguf.file_bytes:
            mapped += n_bytes
        else:
            copied += n_bytes
    return mapped, copied
