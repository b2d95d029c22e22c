"""The files of LoRA adapters: GGUF, with pairs of small matrices that change products of a model's.

`NAME.lora_a` [rank, n_in] and `NAME.lora_b` [n_out, rank] belong to the model's tensor NAME; of the
embedding `lora_a` is [n_vocab, rank], and `lora_b` [n_embd, rank]. `convert_lora_to_gguf.py` of
llama.cpp writes such files, and `src/llama-adapter.cpp` reads them. As there, the factor of a pair
is alpha / rank, or 1 without an alpha, and norms in a file are left out.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.errors import ModelFileError, UsageError, counted, printable, quoted
from localkv.kernels.low_rank import MOST_SCALE, low_rank_bytes
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.model_header import ModelHeader
from localkv.loader.tensor_reader import FileTensors

EMBEDDING = "token_embd.weight"
A, B = ".lora_a", ".lora_b"
MOST_ADAPTERS = 256
"""That one model has at most."""


@dataclass(frozen=True, eq=False)
class AdapterFile:
    """An adapter's file, whose header is consistent.

    Attributes:
        alpha: 0 if the file has none.
        pairs: names of the model's tensors -> A and B.
        norms: names of norms, which are not applied.
        activation: tokens that switch it on (aLoRA), or none.
    """

    gguf: GGUFFile
    architecture: str
    alpha: float
    pairs: Mapping[str, tuple[TensorInfo, TensorInfo]]
    norms: tuple[str, ...]
    activation: tuple[int, ...]

    @property
    def path(self) -> Path:
        return self.gguf.path

    @property
    def warnings(self) -> list[str]:
        """What of it has no effect, one line each."""
        name, found = printable(self.path.name), []
        if self.norms:
            found.append(f"{name}: {counted(len(self.norms), 'norm')} in it are not applied")
        return found

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that pairs have, each once, in ascending order."""
        return tuple(sorted({b.shape[-1] for _, b in self.pairs.values()}))

    def factor(self, name: str) -> float:
        """What B A of a pair is multiplied with, beside the scale."""
        return self.alpha / self.pairs[name][1].shape[-1] if self.alpha else 1.0

    def values(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A and B of a pair.

        Raises:
            ModelFileError: a value is NaN or infinite.
        """
        found = []
        for info in self.pairs[name]:
            values = FileTensors(self.gguf).packed(info.name, info.shape).decode()
            if not np.isfinite(values).all():
                raise self.error(f"tensor {quoted(info.name)} has values that are NaN or infinite")
            found.append(values)
        return found[0], found[1]

    def fingerprint(self) -> str:
        """32 hexadecimal digits over what it does: all tensors, and alpha."""
        found = hashlib.sha256(repr((self.alpha, self.activation)).encode())
        for name in sorted(self.pairs):
            for info in self.pairs[name]:
                text = f"{info.name}\0{info.format.name}\0{info.shape}\0"
                found.update(text.encode(errors="replace"))
                found.update(np.ascontiguousarray(self.gguf.data(info.name)).data)
        return found.hexdigest()[:32]

    def error(self, message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{printable(self.path.name)}: {message}", hint)

    def check_fits(self, model: ModelHeader, config: ModelSpec) -> None:
        """Refuse the adapter of another model.

        Raises:
            ModelFileError: the architecture is another, or a tensor is not in the model, or of
                another shape.
        """
        hint = "an adapter works with the model that it was trained for"
        if self.architecture != config.architecture:
            raise self.error(
                f"the adapter is of a {quoted(self.architecture)} model, and "
                f"{printable(model.path.name)} is of {quoted(config.architecture)}",
                hint,
            )
        for name, (a, b) in self.pairs.items():
            info = model.tensors.get(name)
            if info is None:
                raise self.error(
                    f"{quoted(a.name)} changes a tensor that {printable(model.path.name)} has not",
                    hint,
                )
            *stack, n_out, n_in = (1, *info.shape) if len(info.shape) == 1 else info.shape
            wanted = (n_in, n_out) if name == EMBEDDING else (n_out, n_in)
            rank = b.shape[-1]
            shape_a = (wanted[1], rank) if name == EMBEDDING else (*stack, rank, wanted[1])
            shape_b = (*stack, wanted[0], rank)
            for tensor, shape in ((a, shape_a), (b, shape_b)):
                if tensor.shape != shape:
                    raise self.error(
                        f"tensor {quoted(tensor.name)} has shape {list(tensor.shape)}, and "
                        f"{list(shape)} would fit {quoted(name)} {list(info.shape)}",
                        hint,
                    )


def is_adapter(header: ModelHeader) -> bool:
    """Whether a file says that it is an adapter."""
    return header.metadata.string("general.type", "") == "adapter"


def open_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """Open an adapter's file; no matrix is read.

    Raises:
        ModelFileError: it can't be read, is malformed, or is no LoRA adapter.
    """
    gguf = open_gguf(path)
    name, metadata = printable(gguf.path.name), gguf.metadata

    def error(message: str, hint: str | None = None) -> ModelFileError:
        return ModelFileError(f"{name}: {message}", hint)

    kind = metadata.string("general.type", "")
    if kind != "adapter":
        raise error(
            f"general.type is {quoted(kind)}, expected 'adapter'"
            if kind
            else "the file does not say that it is an adapter (general.type)",
            "convert_lora_to_gguf.py of llama.cpp makes an adapter of one of PEFT's",
        )
    kind = metadata.string("adapter.type", "")
    if kind != "lora":
        raise error(f"adapter.type is {quoted(kind)}, and only 'lora' is supported")
    alpha = metadata.number("adapter.lora.alpha", 0.0)
    if not math.isfinite(alpha):
        raise error(f"adapter.lora.alpha is {alpha}")
    halves = dict[str, dict[str, TensorInfo]]()
    norms = []
    for tensor, info in gguf.tensors.items():
        if tensor.endswith((A, B)):
            halves.setdefault(tensor[: -len(A)], {})[tensor[-len(A) :]] = info
        elif tensor.endswith("_norm.weight"):
            norms.append(tensor)
        else:
            raise error(f"tensor {quoted(tensor)} is none of an adapter's, which end in {A} or {B}")
    for tensor, found in halves.items():
        if len(found) < 2:
            (there,) = found
            raise error(f"{quoted(tensor + there)} has no {B if there == A else A} beside it")
    if not halves:
        raise error("the adapter changes no tensor")
    return AdapterFile(
        gguf,
        metadata.string("general.architecture"),
        float(alpha),
        {tensor: (found[A], found[B]) for tensor, found in halves.items()},
        tuple(norms),
        tuple(metadata.integers("adapter.alora.invocation_tokens", [])),
    )


def opened_adapters(
    lora: str | os.PathLike[str] | Mapping[str, float] | Sequence[str],
    model: ModelHeader,
    config: ModelSpec,
    device: str,
) -> list[tuple[AdapterFile, float]]:
    """The adapters that `LLM` is given, with their scales, checked against a model's file.

    Args:
        device: the name of the backend.

    Raises:
        ModelFileError: a file can't be read, is no adapter, or not one of the model.
        UsageError: there are too many, or the model can't have any.
    """
    if isinstance(lora, (str, os.PathLike)):
        lora = [os.fspath(lora)]
    given = dict(lora) if isinstance(lora, Mapping) else dict.fromkeys(lora, 1.0)
    if len(given) < len(lora):
        twice = next(path for path in lora if [*lora].count(path) > 1)
        raise UsageError(f"the adapter {printable(twice)} is named twice")
    if len(given) > MOST_ADAPTERS:
        raise UsageError(f"{len(given)} adapters, and a model has at most {MOST_ADAPTERS}")
    if given and device not in ("cpu", "reference"):
        raise UsageError(
            f"adapters are applied on a CPU only, not on {device}",
            hint="use device cpu, or merge them into the model's file (llama-export-lora)",
        )
    if given and config.is_encoder:
        raise UsageError(
            f"a {config.architecture} model makes embeddings, and adapters change texts only",
            hint="merge the adapter into the model's file (llama-export-lora)",
        )
    found = []
    for path, scale in given.items():
        if not abs(scale) <= MOST_SCALE:
            raise UsageError(
                f"the scale of the adapter {printable(path)} is {scale}",
                hint=f"use a number from -{MOST_SCALE:g} to {MOST_SCALE:g}",
            )
        file = open_adapter(path)
        file.check_fits(model, config)
        if file.activation:
            raise file.error(
                "the adapter acts from its activation tokens on (aLoRA), which is not supported",
                hint="an adapter without adapter.alora.invocation_tokens would work",
            )
        found.append((file, float(scale)))
    return found


def adapter_memory(files: Sequence[AdapterFile], config: ModelSpec) -> tuple[int, int]:
    """The bytes of adapters in memory; and the ranks of all pairs of a layer together, at most. A
    rank of routed experts counts for each expert of a token."""
    ranks = Counter[str]()
    n_used = max((layer.moe.n_experts_used for layer in config.kinds if layer.moe), default=1)
    for file in files:
        for name, (_, b) in file.pairs.items():
            layer = name.split(".")[1] if name.startswith("blk.") else ""
            ranks[layer] += b.shape[-1] * (n_used if len(b.shape) > 2 else 1)
    return sum(map(adapter_bytes, files)), max(ranks.values(), default=0)


def adapter_bytes(file: AdapterFile) -> int:
    """Bytes of an adapter in memory, as products read it."""
    total = 0
    for name, (a, b) in file.pairs.items():
        rank = b.shape[-1]
        if name == EMBEDDING:
            total += 4 * rank * (a.shape[0] + b.shape[0])
        else:
            total += math.prod(a.shape[:-2]) * low_rank_bytes(rank, a.shape[-1], b.shape[-2])
    return total
