"""The source of a model to measure, and its header: enough to plan with. No torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from localkv.arch.spec import ModelSpec
from localkv.loader.gguf_file import open_gguf
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.known_models import KNOWN_MODELS, shape_and_type, shape_tensors
from localkv.loader.model_summary import file_type_name
from localkv.loader.weights import checked_spec
from localkv.memory.weight_bytes import weights_by_type


@dataclass(frozen=True)
class Source:
    """A file, or a shape that is given random weights.

    Attributes:
        name: the file, or SHAPE:TYPE.
        quant: the type of most weights, "Q4_K_M".
        tensors: all of them.
        config: the model's sizes.
        path: the file, None for a shape.
    """

    name: str
    quant: str
    tensors: tuple[TensorInfo, ...]
    config: ModelSpec
    path: Path | None = None

    @property
    def n_bytes(self) -> int:
        """Of the weights, as files have them."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def n_params(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def kind(self) -> str:
        """Architecture, size and type of the weights: "llama 1.2B Q4_0"."""
        return f"{self.config.architecture} {_rounded(self.n_params)} {self.quant}"


def file_source(path: str | os.PathLike[str]) -> Source:
    """The model in a file.

    Raises:
        ModelFileError: it is missing, malformed, or not supported.
    """
    gguf = open_gguf(path)
    tensors = tuple(gguf.tensors.values())
    quant = file_type_name(gguf.metadata) or weights_by_type(tensors)[0].name.upper()
    return Source(os.fspath(path), quant, tensors, checked_spec(gguf), Path(path))


def synthetic_source(name: str) -> Source:
    """The model that "SHAPE:TYPE" names (`loader/known_models.py`).

    Raises:
        UsageError: there is no such shape, or no such type of weights.
    """
    shape, type_name = shape_and_type(name)
    tensors = shape_tensors(shape, type_name)
    return Source(f"{shape}:{type_name}", type_name.upper(), tensors, KNOWN_MODELS[shape].spec)


def _rounded(n: int) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= factor:
            value = n / factor
            return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    return str(n)
