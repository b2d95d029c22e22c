"""The model to measure: its header, which is enough to plan with, and the loaded model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from localkv.arch.spec import ModelSpec
from localkv.cache.layout import PAGE_TOKENS
from localkv.config import Overrides
from localkv.kernels.select import select_backend, unused_gpu
from localkv.llm import LLM
from localkv.loader.gguf_file import open_gguf
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.known_models import KNOWN_MODELS, shape_and_type, shape_tensors
from localkv.loader.metadata import file_type_name
from localkv.loader.model_header import with_overrides
from localkv.loader.synthetic import synthetic_model
from localkv.loader.weights import checked_spec
from localkv.memory.plan import weights_by_type
from localkv.model import Transformer


@dataclass(frozen=True)
class Source:
    """A file, or a shape that is given random weights.

    Attributes:
        name: the file, or SHAPE:TYPE.
        quant: the type of most weights, "Q4_K_M".
        tensors: all of them.
        config: the model's sizes.
        path: the file, None for a shape.
        overrides: what options put in the place of what it says.
    """

    name: str
    quant: str
    tensors: tuple[TensorInfo, ...]
    config: ModelSpec
    path: Path | None = None
    overrides: Overrides = field(default_factory=Overrides)

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights as files store them."""
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def n_params(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def kind(self) -> str:
        """Architecture, size and type of the weights: "llama 1.2B Q4_0"."""
        return f"{self.config.architecture} {_rounded(self.n_params)} {self.quant}"


def file_source(path: str | os.PathLike[str], overrides: Overrides | None = None) -> Source:
    """The model in a file.

    Args:
        overrides: what options put in the place of what it says.

    Raises:
        ModelFileError: it is missing, malformed, or not supported.
        UsageError: an option makes no sense for it.
    """
    overrides = overrides or Overrides()
    gguf = with_overrides(open_gguf(path), overrides)
    tensors = tuple(gguf.tensors.values())
    quant = file_type_name(gguf.metadata) or weights_by_type(tensors)[0].name.upper()
    return Source(os.fspath(path), quant, tensors, checked_spec(gguf), Path(path), overrides)


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


@dataclass(frozen=True)
class Subject:
    """A model on a backend, where it is from, and lines that the user should see."""

    source: Source
    model: Transformer
    warnings: tuple[str, ...] = ()


def load(
    source: Source,
    device: str = "auto",
    fit: str = "on",
    offload: Mapping[str, Any] = MappingProxyType({}),
) -> Subject:
    """Load a file, or draw random weights.

    Args:
        offload: the arguments of `LLM` that divide a model over devices; of a file only.

    Raises:
        LocalKVError: as `LLM` does.
    """
    if source.path is None:
        shape, _, type_name = source.name.partition(":")
        model = synthetic_model(shape, type_name, select_backend(device))
        line = unused_gpu(device)
        return Subject(source, model, (line,) if line else ())
    llm = LLM(
        source.path,
        n_ctx=PAGE_TOKENS,
        device=device,
        fit=fit,
        progress=False,
        override_kv=source.overrides.kv,
        **asdict(source.overrides.rope),
        **offload,
    )
    if llm.backend.late is not None:
        llm.backend.late.finish()
    return Subject(source, llm.engine.model, tuple(llm.warnings))
