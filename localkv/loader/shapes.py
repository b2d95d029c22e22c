"""Models of a well-known shape, and the tensors that a file of one would list. No torch.

Enough for planning memory; `synthetic.py` makes models of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec
from localkv.errors import UsageError
from localkv.formats import FORMATS
from localkv.formats.base import QuantFormat
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.known_shape import KnownShape
from localkv.loader.known_shapes import KNOWN_SHAPES
from localkv.loader.listed_tensors import listed_tensors
from localkv.loader.metadata import Metadata
from localkv.loader.quantised_format import is_quantised, quantised_format
from localkv.option_names import unknown_name


@cache
def _spec(shape: KnownShape) -> ModelSpec:
    """What the architecture's family makes of a shape's keys, as of a file's."""
    prefixed = {f"{shape.architecture}.{key}": value for key, value in shape.keys.items()}
    token_embd = {"token_embd.weight": (shape.n_vocab, shape.keys["embedding_length"])}
    shapes = {**token_embd, **shape.tensors}
    metadata = Metadata(prefixed, shape.name)
    return ARCHS[shape.architecture](Facts(shape.architecture, shape.name, metadata, shapes))


class _Shapes(Mapping[str, ModelSpec]):
    """Specifications by the shape's name, made when they are asked for."""

    def __getitem__(self, name: str) -> ModelSpec:
        return _spec(KNOWN_SHAPES[name])

    def __iter__(self) -> Iterator[str]:
        return iter(KNOWN_SHAPES)

    def __len__(self) -> int:
        return len(KNOWN_SHAPES)


SHAPES: Mapping[str, ModelSpec] = _Shapes()
SHAPES_LISTED = "localkv plan --help-all lists the shapes, and the types of weights"


def shape_and_type(name: str) -> tuple[str, str]:
    """The shape and the type of weights that "SHAPE:TYPE" names, in lower case but for types' K.

    Raises:
        UsageError: there is no such shape, or it names no type (of weights: `check_shape`).
    """
    shape, colon, type_name = name.lower().partition(":")
    _check_name(shape)
    if not colon:
        raise UsageError(
            f"--synthetic {name} names no type of weights",
            hint=f"as in --synthetic {shape}:q4_0",
        )
    return shape, {known.lower(): known for known in FORMATS}.get(type_name, type_name)


def check_shape(name: str, type_name: str) -> None:
    """Refuse what no model can be made of.

    Raises:
        UsageError: there is no such shape, or no such type of weights.
    """
    _check_name(name)
    if type_name not in FORMATS or not FORMATS[type_name].is_weight:
        types = [fmt.name for fmt in FORMATS.values() if fmt.is_weight]
        raise unknown_name("unknown type of weights", type_name, types, SHAPES_LISTED)


def _check_name(shape: str) -> None:
    if shape not in SHAPES:
        raise unknown_name("unknown shape", shape, SHAPES, SHAPES_LISTED)


def tensor_format(
    name: str, shape: tuple[int, ...], type_name: str, *, is_output: bool
) -> QuantFormat:
    """Of a tensor in a file whose type of weights is `type_name`."""
    if not is_quantised(name, shape):
        return FORMATS["f32"]
    return quantised_format(shape[-1], type_name, is_output=is_output)


def shape_tensors(name: str, type_name: str) -> tuple[TensorInfo, ...]:
    """The tensors of a model of a shape, with matrices of one type; offsets are not known.

    Raises:
        UsageError: as `check_shape`.
    """
    check_shape(name, type_name)
    tensors = []
    known = KNOWN_SHAPES[name]
    for tensor, shape in listed_tensors(SHAPES[name], known.has):
        fmt = tensor_format(tensor, shape, type_name, is_output=tensor == known.output_matrix)
        n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
        tensors.append(TensorInfo(tensor, shape, fmt, n_bytes, offset=0, part=0))
    return tuple(tensors)
