"""Adapters of a loaded model: what each file adds to which product.

The loader splits and rearranges rows of some tensors. So it is run once more on numbers of rows in
the place of weights, which shows where each row of a matrix came from.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec
from localkv.errors import quoted
from localkv.kernels.backend import Backend
from localkv.kernels.layer_weights import Linear, MoeWeights
from localkv.kernels.low_rank import Adapters, LowRank, TokenScales
from localkv.loader.adapter_file import EMBEDDING, AdapterFile, adapter_bytes
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.tensor_reader import TensorReader
from localkv.loader.weights import NothingPrepared, model_weights
from localkv.model import AdaptedTransformer, EmbeddingAdapter, ModelWeights, Transformer
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter of a model, as it is told to others.

    Attributes:
        path: as it was given.
        scale: that texts have which ask for none.
        fingerprint: of the file.
        n_bytes: in memory.
        ranks: of its pairs.
        n_tensors: that it changes.
    """

    path: str
    scale: float
    fingerprint: str
    n_bytes: int
    ranks: tuple[int, ...]
    n_tensors: int


def load_adapters(
    model: Transformer, gguf: GGUFFile, files: Sequence[tuple[AdapterFile, float]], backend: Backend
) -> list[LoadedAdapter]:
    """Give a model adapters, each with the scale of texts that ask for none.

    Raises:
        ModelFileError: one is not of this model, or changes a tensor that can't be changed.
    """
    config, scales = model.config, TokenScales(len(files))
    origins, names = _origins(gguf, config)
    parts = _Parts(files, names, scales)
    weights = with_products(model.weights, origins, parts.of, parts.of_experts)
    for file, _ in files:
        left = [name for name in file.pairs if (id(file), name) not in parts.used]
        if left:
            raise file.error(
                f"an adapter can't change {quoted(left[0])} here",
                "merge it into the model's file: llama.cpp's llama-export-lora does that",
            )
    model.adapted = AdaptedTransformer(config, weights, backend, scales, tuple(parts.embedding))
    loaded = [
        LoadedAdapter(
            os.fspath(file.path),
            scale,
            file.fingerprint(),
            adapter_bytes(file),
            file.ranks,
            len(file.pairs),
        )
        for file, scale in files
    ]
    model.adapters = tuple(adapter.fingerprint for adapter in loaded)
    model.scales = tuple(adapter.scale for adapter in loaded)
    return loaded


class _Parts:
    """Makes what adapters add to each product.

    Args:
        files: adapters and scales.
        names: the model's tensors by number.
        scales: of the model.

    Attributes:
        used: (id of the file, name) of pairs that a product has.
        embedding: what adapters add to rows of the embedding.
    """

    def __init__(
        self, files: Sequence[tuple[AdapterFile, float]], names: Sequence[str], scales: TokenScales
    ) -> None:
        self.files, self.names, self.scales = files, names, scales
        self.used = set[tuple[int, str]]()
        self.embedding = list[EmbeddingAdapter]()
        for number, (file, _) in enumerate(files):
            if EMBEDDING in file.pairs:
                a, b = file.values(EMBEDDING)
                self.embedding.append(EmbeddingAdapter(number, a, b, file.factor(EMBEDDING)))
                self.used.add((id(file), EMBEDDING))

    def of(self, linear: Linear, origins: Linear) -> Linear:
        """A product with what adapters add to it.

        Args:
            origins: the same, of numbers of rows.
        """
        found = list[LowRank]()
        rows = np.asarray(origins.weight.rows).reshape(-1)
        tensors, rows = rows >> ROW_BITS, rows & ((1 << ROW_BITS) - 1)
        for tensor in np.unique(tensors):
            name = self.names[tensor]
            if name == EMBEDDING:  # of a model whose output matrix it is, too
                continue
            chosen = tensors == tensor
            for number, (file, _) in enumerate(self.files):
                if name not in file.pairs or len(file.pairs[name][0].shape) > 2:
                    continue
                self.used.add((id(file), name))
                a, b = file.values(name)
                whole = np.zeros((len(rows), b.shape[1]), np.float32)
                whole[chosen] = b[rows[chosen]]
                found.append(LowRank.of(number, a, whole, file.factor(name)))
        if not found:
            return linear
        found.sort(key=lambda part: part.adapter)
        return replace(linear, adapters=Adapters(tuple(found), self.scales))

    def of_experts(self, experts: MoeWeights, origins: MoeWeights) -> MoeWeights:
        """Routed experts with what adapters add to their stacks.

        Args:
            origins: the same, of numbers of tensors.
        """
        changed = dict[str, Any]()
        for part in ("gate", "up", "down", "gate_up"):
            stack = getattr(origins, f"ffn_{part}_exps")
            if stack is None:
                continue
            name, found = self.names[int(stack.rows.flat[0]) >> ROW_BITS], list[LowRank]()
            for number, (file, _) in enumerate(self.files):
                if name in file.pairs:
                    self.used.add((id(file), name))
                    found.append(LowRank.of(number, *file.values(name), file.factor(name)))
            if found:
                changed[f"{part}_adapters"] = Adapters(tuple(found), self.scales)
        return replace(experts, **changed) if changed else experts


ROW_BITS = 40
"""Bits of the number of a row; those above are the tensor's number."""


class _Rows(PackedTensor):
    """A tensor whose rows are their numbers, int64 [..., 1]; its values are zeros."""

    def decode(self) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), self.shape)


class _RowNumbers:
    """A `TensorSource` of numbers of rows in the place of a file's rows."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.gguf = gguf
        self.names = list[str]()

    def has(self, name: str) -> bool:
        # the matrices of latents' heads, which no adapter can change, as newer files have them
        return name in self.gguf.tensors and not name.endswith("attn_kv_b.weight")

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        number = len(self.names) << ROW_BITS
        self.names.append(name)
        info = self.gguf.tensors.get(name)
        fmt = FORMATS["f32"] if info is None else info.format
        if len(shape) == 2:
            rows = number + np.arange(shape[0], dtype=np.int64)[:, None]
        else:  # of vectors, and of stacks, which have one number
            rows = np.broadcast_to(np.int64(number), (*shape[:-1], 1))
        return _Rows(fmt, rows, shape)

    def release(self, name: str) -> None:
        pass


def _origins(gguf: GGUFFile, config: ModelSpec) -> tuple[ModelWeights, list[str]]:
    """Where the rows of each matrix came from, and the tensors' names by number."""
    source = _RowNumbers(gguf)
    return model_weights(TensorReader(source, NothingPrepared()), config), source.names


_ELSEWHERE = ("prediction", "classifier", "dense", "token_embd")
"""Parts of the weights that no adapter changes, or not as a product."""


def with_products(
    part: Any,
    origins: Any,
    change: Callable[[Linear, Linear], Linear],
    change_experts: Callable[[MoeWeights, MoeWeights], MoeWeights] = lambda experts, _: experts,
) -> Any:
    """A part of the weights with its products changed; what stays as it was is the same object.

    Args:
        origins: another part of the same shape, which is handed on beside it.
    """
    if isinstance(part, Linear):
        return change(part, origins)
    if isinstance(part, tuple):
        pairs = zip(part, origins, strict=True)
        items = tuple(with_products(*pair, change, change_experts) for pair in pairs)
        same = all(a is b for a, b in zip(items, part, strict=True))
        return part if same else items
    if not is_dataclass(part) or isinstance(part, (PackedTensor, type)):
        return part
    changed = {
        field.name: new
        for field in fields(part)
        if field.name not in _ELSEWHERE
        and (old := getattr(part, field.name)) is not None
        and (new := with_products(old, getattr(origins, field.name), change, change_experts))
        is not old
    }
    found = replace(part, **changed) if changed else part
    return change_experts(found, origins) if isinstance(found, MoeWeights) else found
