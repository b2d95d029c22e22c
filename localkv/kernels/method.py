"""How a backend carries out its operations, in words.

A backend answers for tensors as it has prepared them and for types of the cache (`Methods`), so
that statements about a model follow from the code that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from localkv.kernels.layer_weights import (
    LayerWeights,
    Linear,
    MoeWeights,
    tensors_of,
)
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.base import QuantFormat
from localkv.quant_formats.packed_tensor import PackedTensor


@dataclass(frozen=True)
class Method:
    """How an operation is carried out, in words: "packed panels, 8-bit activations"."""

    words: str


@dataclass(frozen=True)
class Methods:
    """Those of one backend.

    Attributes:
        attention: of all cache types.
        tiles: (cache type, "K" or "V") -> the form in which attention multiplies its rows.
        store: cache type -> how new rows are packed.
        product: a prepared matrix, or a stack of them -> how it is multiplied.
        experts: prepared weights of routed experts -> how they are run.
        others: operations that depend on no type.
    """

    attention: Method
    tiles: Callable[[QuantFormat, str], Method]
    store: Callable[[QuantFormat], Method]
    product: Callable[[PackedTensor], Method]
    experts: Callable[[MoeWeights], Method]
    others: Mapping[str, Method] = field(default_factory=dict)


class Use(NamedTuple):
    """The operations of a model on a backend; `of` is a type, or empty."""

    operation: str
    of: str
    method: Method


def uses(
    methods: Methods,
    layers: Sequence[LayerWeights],
    output: Linear,
    pairs: Sequence[tuple[str, str]],
) -> list[Use]:
    """All that runs for a model's prepared weights and a cache with these pairs of types, each
    once."""
    cache = [(name, side) for pair in pairs for name, side in zip(pair, "KV", strict=True)]
    found = [Use(operation, "", method) for operation, method in methods.others.items()]
    found.append(Use("attention", "", methods.attention))
    found += [Use(f"tiles of {side}", "", methods.tiles(KV_FORMATS[t], side)) for t, side in cache]
    found += [Use("storing", name, methods.store(KV_FORMATS[name])) for name, _ in cache]
    matrices = (part for part in tensors_of((*layers, output)) if isinstance(part, PackedTensor))
    found += [Use("products", matrix.format.name, methods.product(matrix)) for matrix in matrices]
    routed = (layer.moe for layer in layers if layer.moe is not None)
    found += [Use("experts", "", methods.experts(moe)) for moe in routed]
    return list(dict.fromkeys(found))


def in_words(found: Sequence[Use]) -> dict[str, str]:
    """Each operation in a few words, as "q4_K, q6_K: packed panels; f32: rows" where types differ.

    Types of one method stand together.
    """
    operations = dict[str, dict[str, list[str]]]()
    for operation, of, method in found:
        operations.setdefault(operation, {}).setdefault(method.words, []).append(of)
    return {
        operation: "; ".join(
            f"{', '.join(types)}: {words}" if any(types) else words
            for words, types in methods.items()
        )
        for operation, methods in operations.items()
    }
