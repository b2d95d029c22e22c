"""Named tensors -> `ModelWeights`: names, shapes and what is optional.

Matrices are views of the mapped file until the backend has prepared them. Norms and biases, which
are small, become float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec
from localkv.cache.arrays import Array
from localkv.errors import ModelFileError, byte_size
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.backend import Backend
from localkv.kernels.device_memory import naming_what_fails
from localkv.kernels.layer_weights import (
    AttentionWeights,
    LayerWeights,
    Linear,
    MlpWeights,
    MoeWeights,
    Norm,
)
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.model_spec import model_spec
from localkv.model import ModelWeights, Transformer


class TensorSource(Protocol):
    """Where the tensors of a model come from."""

    def has(self, name: str) -> bool: ...

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor of this shape, or a ModelFileError."""
        ...

    def release(self, name: str) -> None:
        """The tensor's bytes are not needed any more."""
        ...


@dataclass(frozen=True)
class FileTensors:
    """The tensors of a file, as views of its mapping."""

    gguf: GGUFFile

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        info = self.gguf.tensors.get(name)
        if info is None:
            raise ModelFileError(f"missing tensor {name!r} in {self.gguf.path.name}")
        if info.shape != shape:
            raise ModelFileError(
                f"tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}"
            )
        return PackedTensor(info.format, self.gguf.data(name), info.shape)

    def release(self, name: str) -> None:
        self.gguf.release(name)


@dataclass
class TensorReader:
    """Hands out a model's tensors by name and remembers which were taken.

    Attributes:
        source: the file, or what takes its place.
        backend: prepares matrices; norms and biases are of the type of its activations.
        halve_activations: what meets an F16 weight is rounded to f16, as ggml does. That is less
            exact, but where experts are routed by the largest of nearly equal numbers, ggml's
            rounding decides which, and without it a token's logits are another expert's.
        taken: names of the tensors handed out.
    """

    source: TensorSource
    backend: Backend
    halve_activations: bool = False
    taken: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def packed(self, name: str, *shape: int) -> PackedTensor:
        """A matrix, or a stack of them, as it is in the file."""
        packed = self.source.packed(name, shape)
        self.taken.add(name)
        halves = self.halve_activations and packed.format.name == "f16"
        return replace(packed, halves_activations=halves)

    def matrix(self, name: str, *shape: int) -> PackedTensor:
        """A matrix, or a stack of them, as the backend's products want it."""
        return self._prepared(name, self._prepare(name, self.packed(name, *shape)))

    def embedding(self, name: str, n_vocab: int, n_embd: int) -> PackedTensor:
        """The matrix of embeddings, as the backend wants it."""
        packed = self.packed(name, n_vocab, n_embd)
        with self._room(name, packed):
            return self._prepared(name, self.backend.prepare_embedding(packed))

    def _prepare(self, name: str, packed: PackedTensor) -> PackedTensor:
        with self._room(name, packed):
            return self.backend.prepare(packed)

    def _room(self, name: str, packed: PackedTensor) -> AbstractContextManager[None]:
        return naming_what_fails(
            f"the weights' {name} of {byte_size(packed.n_bytes)}",
            self.backend.memory,
            lambda room: (
                f"weights, K, V and scratch of {byte_size(room.free + room.taken)} in all would "
                "fit: use a smaller model or quantisation, or --device cpu"
            ),
        )

    def _prepared(self, name: str, weight: PackedTensor) -> PackedTensor:
        if not weight.reads_rows:
            self.source.release(name)
        return weight

    def values(self, name: str, size: int) -> NDArray[np.float32]:
        """Those of a vector, on the host."""
        return self.packed(name, size).decode()

    def vector(self, name: str, size: int) -> Array:
        """A norm's or a bias' values, in the backend's type of activations."""
        arrays = self.backend.arrays
        return arrays.floating(arrays.from_numpy(self.values(name, size)))

    def norm(self, spec: NormSpec, size: int, at: str = "") -> Norm:
        """A norm of rows of `size`; `at` is its layer's prefix."""
        weight, bias = f"{at}{spec.tensor}.weight", f"{at}{spec.tensor}.bias"
        return Norm(
            spec,
            self.vector(weight, size),
            self.vector(bias, size) if spec.kind == "layer" and self.has(bias) else None,
        )

    def linear(self, name: str, n_out: int, n_in: int, *, bias_required: bool = False) -> Linear:
        """`name`.weight, and `name`.bias if the file has it or the architecture must."""
        bias = f"{name}.bias"
        return Linear(
            self.matrix(f"{name}.weight", n_out, n_in),
            self.vector(bias, n_out) if bias_required or self.has(bias) else None,
        )

    def fused_linear(
        self, name: str, n_out: tuple[int, ...], n_in: int, *, bias_required: bool = False
    ) -> tuple[Linear, ...]:
        """The parts, of `n_out` rows each, of one matrix in the file."""
        weight = self.packed(f"{name}.weight", sum(n_out), n_in)
        bias = None
        if bias_required or self.has(f"{name}.bias"):
            bias = self.vector(f"{name}.bias", sum(n_out))
        parts = []
        for a, b in pairwise(accumulate(n_out, initial=0)):
            part = self._prepare(f"{name}.weight", weight[a:b])
            parts.append(Linear(part, None if bias is None else bias[a:b]))
        if not any(part.weight.reads_rows for part in parts):
            self.source.release(f"{name}.weight")
        return tuple(parts)


def load_model(
    path: str | os.PathLike[str] | GGUFFile,
    backend: Backend,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Transformer, list[str]]:
    """The model in a GGUF file, on a backend.

    Args:
        path: the file.
        backend: prepares the weights as it wants them.
        on_layer: called with the layers that are loaded, of how many.

    Returns:
        the model, and the names of tensors that it does not use.

    Raises:
        ModelFileError: the file is malformed, its architecture or a type is not supported, or a
            tensor is missing or of the wrong shape.
    """
    gguf = path if isinstance(path, GGUFFile) else open_gguf(path)
    config = model_spec(gguf)
    read = TensorReader(FileTensors(gguf), backend, halve_activations=config.has_experts)
    weights = model_weights(read, config, on_layer)
    unused = [name for name in gguf.tensors if name not in read.taken]
    return Transformer(config, weights, backend), unused


def model_weights(
    read: TensorReader,
    config: ModelSpec,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> ModelWeights:
    """All tensors that a model has.

    Args:
        on_layer: called with the layers that are read, of how many.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    n_vocab, n_embd = config.n_vocab, config.n_embd
    token_embd = read.embedding("token_embd.weight", n_vocab, n_embd)
    if read.has("output.weight"):
        output = read.linear("output", n_vocab, n_embd)
    elif not token_embd.reads_rows:
        output = Linear(token_embd)
    else:
        output = Linear(read.matrix("token_embd.weight", n_vocab, n_embd))
    rope_freqs = None
    if config.has_divisors:
        n_dims = max(rope.n_dims for rope in config.ropes if rope.has_divisors)
        rope_freqs = read.values("rope_freqs.weight", n_dims // 2)
    layers = []
    for i, spec in enumerate(config.layers):
        on_layer(i, config.n_layers)
        layers.append(_layer(read, spec, n_embd, f"blk.{i}."))
    on_layer(config.n_layers, config.n_layers)
    return ModelWeights(
        token_embd=token_embd,
        layers=tuple(layers),
        output_norm=read.norm(config.output_norm, n_embd),
        output=output,
        rope_freqs=rope_freqs,
    )


def _layer(read: TensorReader, spec: LayerSpec, n_embd: int, at: str) -> LayerWeights:
    def norm(of: NormSpec | None) -> Norm | None:
        return None if of is None else read.norm(of, n_embd, at)

    ffn: MlpWeights | MoeWeights
    if isinstance(spec.ffn, MoeSpec):
        ffn = _moe(read, spec.ffn, n_embd, at)
    else:
        ffn = _mlp(read, spec.ffn.n_ff, n_embd, f"{at}ffn_", "")
    return LayerWeights(
        attention=_attention(read, spec.attention, n_embd, at),
        ffn=ffn,
        attn_norm=norm(spec.attn_norm),
        ffn_norm=norm(spec.ffn_norm),
        post_attn_norm=norm(spec.post_attn_norm),
        post_ffn_norm=norm(spec.post_ffn_norm),
    )


def _attention(read: TensorReader, spec: AttentionSpec, n_embd: int, at: str) -> AttentionWeights:
    n_q, n_k = spec.n_heads * spec.key_dim, spec.n_kv_heads * spec.key_dim
    n_v, bias = spec.n_kv_heads * spec.value_dim, spec.qkv_bias
    if read.has(f"{at}attn_qkv.weight"):
        attn_q, attn_k, attn_v = read.fused_linear(
            f"{at}attn_qkv", (n_q, n_k, n_v), n_embd, bias_required=bias
        )
    else:
        attn_q, attn_k, attn_v = (
            read.linear(f"{at}{name}", n_out, n_embd, bias_required=bias)
            for name, n_out in (("attn_q", n_q), ("attn_k", n_k), ("attn_v", n_v))
        )
    q_norm, k_norm, sinks = spec.q_norm, spec.k_norm, spec.sinks
    return AttentionWeights(
        attn_q=attn_q,
        attn_k=attn_k,
        attn_v=attn_v,
        attn_output=read.linear(f"{at}attn_output", n_embd, spec.n_heads * spec.value_dim),
        attn_q_norm=None if q_norm is None else read.norm(q_norm, spec.key_dim, at),
        attn_k_norm=None if k_norm is None else read.norm(k_norm, spec.key_dim, at),
        sinks=None if sinks is None else read.vector(f"{at}{sinks}.weight", spec.n_heads),
    )


def _mlp(read: TensorReader, n_ff: int, n_embd: int, prefix: str, suffix: str) -> MlpWeights:
    return MlpWeights(
        ffn_gate=read.linear(f"{prefix}gate{suffix}", n_ff, n_embd),
        ffn_up=read.linear(f"{prefix}up{suffix}", n_ff, n_embd),
        ffn_down=read.linear(f"{prefix}down{suffix}", n_embd, n_ff),
    )


def _moe(read: TensorReader, moe: MoeSpec, n_embd: int, at: str) -> MoeWeights:
    n_experts, n_ff = moe.n_experts, moe.n_ff
    shared, gate = None, None
    if moe.n_ff_shared:
        shared = _mlp(read, moe.n_ff_shared, n_embd, f"{at}ffn_", "_shexp")
        gate = read.vector(f"{at}ffn_gate_inp_shexp.weight", n_embd)
    return MoeWeights(
        ffn_gate_inp=read.linear(f"{at}ffn_gate_inp", n_experts, n_embd),
        ffn_gate_exps=read.matrix(f"{at}ffn_gate_exps.weight", n_experts, n_ff, n_embd),
        ffn_up_exps=read.matrix(f"{at}ffn_up_exps.weight", n_experts, n_ff, n_embd),
        ffn_down_exps=read.matrix(f"{at}ffn_down_exps.weight", n_experts, n_embd, n_ff),
        shared=shared,
        ffn_gate_inp_shexp=gate,
    )
