"""A model's tensors by name, checked for their shapes and prepared for a backend.

Matrices are views of the mapped file until the backend has prepared them. Norms and biases, which
are small, become float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import NormSpec
from localkv.cache.arrays import Array, Arrays
from localkv.errors import ModelFileError, byte_size
from localkv.kernels.backend import LatePreparation
from localkv.kernels.device_memory import DeviceMemory, naming_what_fails
from localkv.kernels.layer_weights import Linear, Norm
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.model_header import ModelHeader
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor


class TensorSource(Protocol):
    """Where the tensors of a model come from."""

    def has(self, name: str) -> bool: ...

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor of this shape, or a ModelFileError."""
        ...

    def release(self, name: str) -> None:
        """The tensor's bytes are not needed any more."""
        ...


class Preparer(Protocol):
    """What of a backend the tensors are prepared by."""

    @property
    def arrays(self) -> Arrays: ...
    @property
    def memory(self) -> DeviceMemory | None: ...
    @property
    def prepare(self) -> Callable[[PackedTensor], PackedTensor]: ...
    @property
    def prepare_embedding(self) -> Callable[[PackedTensor], PackedTensor]: ...


def check_tensor(header: ModelHeader, name: str, shape: tuple[int, ...]) -> TensorInfo:
    """What a header says of a tensor.

    Raises:
        ModelFileError: it is missing, or of another shape.
    """
    info = header.tensors.get(name)
    if info is None:
        raise ModelFileError(f"missing tensor {name!r} in {header.path.name}")
    if info.shape != shape and (info.shape[-1:] != shape[-1:] or _long(info.shape) != _long(shape)):
        raise ModelFileError(
            f"tensor {name!r} has shape {list(info.shape)}, expected {list(shape)}"
        )
    return info


def _long(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of length 1, which converters add and leave out."""
    return tuple(n for n in shape if n != 1)


@dataclass(frozen=True)
class FileTensors:
    """The tensors of a file, as views of its mapping."""

    gguf: GGUFFile

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        info = check_tensor(self.gguf, name, shape)
        rows = self.gguf.data(name)
        if info.shape != shape:
            rows = rows.reshape(*shape[:-1], -1)
        return PackedTensor(info.format, rows, shape)

    def release(self, name: str) -> None:
        self.gguf.release(name)


@dataclass(frozen=True)
class DecodedTensors:
    """The tensors of a model, some of them decoded to float32: those are copies in memory.

    Attributes:
        source: where they come from.
        names: of the tensors that are decoded.
    """

    source: TensorSource
    names: Collection[str]
    _decoded: dict[str, PackedTensor] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor of this shape; who asks twice gets the same copy.

        Raises:
            ModelFileError: it is missing, or of another shape.
        """
        if name not in self.names:
            return self.source.packed(name, shape)
        found = self._decoded.get(name)
        if found is None or found.shape != shape:
            found = self._decoded[name] = in_float32(self.source.packed(name, shape))
            self.source.release(name)
        return found

    def release(self, name: str) -> None:
        self._decoded.pop(name, None)
        self.source.release(name)


def in_float32(tensor: PackedTensor) -> PackedTensor:
    """A copy of a tensor in F32."""
    values = np.empty(tensor.shape, np.float32)
    for tile, part in tensor.row_tiles():
        values[tile] = part.decode()
    return PackedTensor(FORMATS["f32"], values.view(np.uint8), tensor.shape)


@dataclass
class TensorReader:
    """Hands out a model's tensors by name and remembers which were taken.

    Attributes:
        source: the file, or what takes its place.
        backend: prepares matrices; norms and biases are of the type of its activations.
        halve_activations: what meets an F16 weight is rounded to f16, as ggml does. That is less
            exact, but where experts are routed by the largest of nearly equal numbers, ggml's
            rounding decides which, and without it a token's logits are another expert's.
        late: prepares weights that may be laid out after loading, if there are any.
        at: the prefix of all names, such as "blk.3." for a layer.
        taken: names of the tensors handed out, whole.
        names: by the `id` of a prepared matrix, or stack of them, the names of the tensors whose
            rows it has, whole.
    """

    source: TensorSource
    backend: Preparer
    halve_activations: bool = False
    late: LatePreparation | None = None
    at: str = ""
    taken: set[str] = field(default_factory=set)
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def layer(self, index: int) -> TensorReader:
        """Hands out the tensors of a layer, by names without its number."""
        return replace(self, at=f"blk.{index}.")

    def by(self, backend: Preparer | None) -> TensorReader:
        """Hands out the same tensors, prepared by another backend; None is this one."""
        if backend is None or backend is self.backend:
            return self
        return replace(self, backend=backend)

    def has(self, name: str) -> bool:
        return self.source.has(self.at + name)

    def packed(self, name: str, *shape: int) -> PackedTensor:
        """A matrix, or a stack of them, as it is in the file."""
        packed = self.source.packed(self.at + name, shape)
        self.taken.add(self.at + name)
        halves = self.halve_activations and packed.format.name == "f16"
        return replace(packed, halves_activations=halves)

    def matrix(self, name: str, *shape: int) -> PackedTensor:
        """A matrix, or a stack of them, as the backend's products want it."""
        return self._prepared(name, self.derived(name, self.packed(name, *shape)))

    def late_matrix(self, name: str, *shape: int) -> PackedTensor:
        """A matrix, or a stack of them, that may be laid out for the backend after loading."""
        if self.late is None:
            return self.matrix(name, *shape)
        packed = self.packed(name, *shape)
        with self._room(name, packed):
            weight = self.late.prepare(packed, partial(self._release, name))
        return self._named(weight, name)

    def embedding(self, name: str, n_vocab: int, n_embd: int) -> PackedTensor:
        """The matrix of embeddings, as the backend wants it."""
        packed = self.packed(name, n_vocab, n_embd)
        with self._room(name, packed):
            return self._prepared(name, self.backend.prepare_embedding(packed))

    def derived(self, name: str, packed: PackedTensor, *others: str) -> PackedTensor:
        """A part of a tensor, or what was made of it, as the backend's products want it.

        Args:
            others: names of further tensors that it was made of.
        """
        with self._room(name, packed):
            weight = self.backend.prepare(packed)
        return self._named(weight, name, *others)

    def _named(self, weight: PackedTensor, *names: str) -> PackedTensor:
        self.names[id(weight)] = tuple(self.at + name for name in names)
        return weight

    def _room(self, name: str, packed: PackedTensor) -> AbstractContextManager[None]:
        return naming_what_fails(
            f"the weights' {self.at}{name} of {byte_size(packed.n_bytes)}",
            self.backend.memory,
            lambda room: (
                f"weights, K, V and scratch of {byte_size(room.free + room.taken)} in all would "
                "fit: use a smaller model or quantisation, or --device cpu"
            ),
        )

    def _prepared(self, name: str, weight: PackedTensor) -> PackedTensor:
        if not weight.reads_rows:
            self._release(name)
        return weight

    def type_of(self, name: str, *shape: int) -> str:
        """The type of a matrix, by its name."""
        return self.source.packed(self.at + name, shape).format.name

    def _release(self, name: str) -> None:
        self.source.release(self.at + name)

    def values(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Values of a vector or of several, on the host."""
        return self.packed(name, *shape).decode()

    def vector(self, name: str, *shape: int) -> Array:
        """Values of norms, biases and what else no product reads, as the backend's activations."""
        return self.floating(self.values(name, *shape))

    def optional_vector(self, name: str, *shape: int) -> Array | None:
        """A vector that the file may do without."""
        return self.vector(name, *shape) if self.has(name) else None

    def floating(self, values: NDArray[np.float32]) -> Array:
        """Values in the backend's type of activations."""
        arrays = self.backend.arrays
        return arrays.floating(arrays.from_numpy(values))

    def norm(self, spec: NormSpec, size: int) -> Norm:
        """A norm of rows of `size`."""
        if not spec.tensor:
            return Norm(spec, self.floating(np.ones(size, np.float32)))
        weight, bias = f"{spec.tensor}.weight", f"{spec.tensor}.bias"
        if self.has(spec.tensor):  # PLaMo's files leave ".weight" out
            weight = spec.tensor
        return Norm(
            spec,
            self.vector(weight, size),
            self.optional_vector(bias, size) if spec.kind == "layer" or spec.biased else None,
        )

    def head_norm(self, spec: NormSpec, n_heads: int, size: int) -> Norm:
        """A norm of q or k, whose weight has the shape that its span says."""
        if spec.span != "heads":
            return self.norm(spec, n_heads * size if spec.span == "row" else size)
        return Norm(spec, self.vector(f"{spec.tensor}.weight", n_heads, size))

    def linear(self, name: str, n_out: int, n_in: int, *, bias_required: bool = False) -> Linear:
        """`name`.weight, and `name`.bias if the file has it or the architecture must."""
        bias = f"{name}.bias"
        return Linear(
            self.late_matrix(f"{name}.weight", n_out, n_in),
            self.vector(bias, n_out) if bias_required or self.has(bias) else None,
        )

    def linears(self, name: str, n: int, n_out: int, n_in: int) -> tuple[Linear, ...]:
        """The matrices of a stack [n, n_out, n_in], each by itself."""
        stack = self.packed(f"{name}.weight", n, n_out, n_in)
        parts = tuple(Linear(self.derived(f"{name}.weight", stack[i])) for i in range(n))
        if not any(part.weight.reads_rows for part in parts):
            self._release(f"{name}.weight")
        return parts

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
            part = self.derived(f"{name}.weight", weight[a:b])
            parts.append(Linear(part, None if bias is None else bias[a:b]))
        if not any(part.weight.reads_rows for part in parts):
            self._release(f"{name}.weight")
        return tuple(parts)

    def rows_of(
        self, name: str, n_groups: int, parts: Sequence[Sequence[int]], n_in: int
    ) -> tuple[Linear, ...]:
        """Matrices that the file keeps in one matrix, group by group, without a bias.

        Args:
            parts: for each matrix, how many rows each of its parts has in a group. The parts of all
                matrices follow one another there; in a matrix all groups of a part are together.
        """
        widths = [width for part in parts for width in part]
        weight = self.packed(f"{name}.weight", n_groups * sum(widths), n_in)
        rows = np.arange(n_groups * sum(widths)).reshape(n_groups, -1)
        places = iter(np.split(rows, np.cumsum(widths)[:-1], axis=1))
        linears = []
        for part in parts:
            chosen = np.concatenate([next(places).reshape(-1) for _ in part])
            linears.append(Linear(self.derived(f"{name}.weight", weight[chosen])))
        self._release(f"{name}.weight")
        return tuple(linears)

    def interleaved(self, names: Sequence[str], n_heads: int, n_out: int, n_in: int) -> Linear:
        """One matrix of several of `n_out` rows a head, [n_heads * n_out, n_in] each.

        It has all rows of the first head, one matrix after the other, then all of the second.

        Raises:
            ModelFileError: they are of different types.
        """
        parts = [self.packed(f"{name}.weight", n_heads * n_out, n_in) for name in names]
        if len({part.format for part in parts}) > 1:
            types = ", ".join(f"{n} {x.format.name}" for n, x in zip(names, parts, strict=True))
            raise ModelFileError(f"matrices that belong together are of different types: {types}")
        rows = np.stack([part.rows.reshape(n_heads, n_out, -1) for part in parts], axis=1)
        n_rows = len(parts) * n_heads * n_out
        whole = replace(parts[0], rows=rows.reshape(n_rows, -1), shape=(n_rows, n_in))
        tensors = [f"{name}.weight" for name in names]
        linear = Linear(self.derived(tensors[0], whole, *tensors[1:]))
        for tensor in tensors:
            self._release(tensor)
        return linear
