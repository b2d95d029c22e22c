"""The model that is measured: out of a file, or one with random weights made in memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from torch import Tensor

from localkv.bench.result import Model
from localkv.bench.traffic import tensors_of
from localkv.cache_layout import PAGE_TOKENS
from localkv.errors import UsageError
from localkv.kernels.select import select_backend
from localkv.llm import LLM
from localkv.loader.model_summary import file_type_name
from localkv.loader.synthetic import SHAPES, synthetic_model
from localkv.memory_plan import weights_by_type
from localkv.model import Transformer
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor


@dataclass(frozen=True)
class Subject:
    """A model on a backend, what tables say of it, and lines that the user should see."""

    facts: Model
    model: Transformer
    warnings: tuple[str, ...] = ()


def file_subject(path: str | os.PathLike[str], device: str) -> Subject:
    """The model in a file.

    Raises:
        LocalKVError: as `LLM` does.
    """
    llm = LLM(path, n_ctx=PAGE_TOKENS, device=device)
    tensors = llm.gguf.tensors.values()
    n_params = sum(math.prod(tensor.shape) for tensor in tensors)
    quant = file_type_name(llm.gguf.metadata) or weights_by_type(tensors)[0].name.upper()
    facts = Model(
        name=os.fspath(path),
        kind=_kind(llm.config.architecture, n_params, quant),
        n_bytes=sum(tensor.n_bytes for tensor in tensors),
        n_params=n_params,
        n_layers=llm.config.n_layers,
        load_mode="mmap",
    )
    return Subject(facts, llm.engine.model, tuple(llm.warnings))


def synthetic_subject(name: str, device: str) -> Subject:
    """The model that "SHAPE:TYPE" names (`loader/synthetic.py`).

    Raises:
        UsageError: there is no such shape, or no such type of weights.
    """
    shape, colon, type_name = name.partition(":")
    if not colon:
        raise UsageError(
            f"--synthetic {name} names no type of weights",
            hint=f"as in --synthetic {shape or next(iter(SHAPES))}:q4_0",
        )
    # names of types are in lower case but for k
    known = {fmt.lower(): fmt for fmt in FORMATS}
    type_name = known.get(type_name.lower(), type_name)
    backend = select_backend(device)
    model = synthetic_model(shape.lower(), type_name, backend)
    tensors = list({id(tensor): tensor for tensor in tensors_of(model.weights)}.values())
    n_params = sum(math.prod(tensor.shape) for tensor in tensors)
    facts = Model(
        name=f"{shape.lower()}:{type_name}",
        kind=_kind(model.config.architecture, n_params, type_name.upper()),
        n_bytes=sum(map(_file_bytes, tensors)),
        n_params=n_params,
        n_layers=model.config.n_layers,
        load_mode="none",
    )
    return Subject(facts, model)


def _file_bytes(tensor: PackedTensor | Tensor) -> int:
    """Bytes in a file, where rows end with their last block and vectors are float32."""
    if isinstance(tensor, Tensor):
        return 4 * tensor.numel()
    return math.prod(tensor.shape[:-1]) * tensor.format.row_bytes(tensor.shape[-1])


def _kind(architecture: str, n_params: int, quant: str) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n_params >= factor:
            return f"{architecture} {_two_digits(n_params / factor)}{unit} {quant}"
    return f"{architecture} {n_params} {quant}"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
