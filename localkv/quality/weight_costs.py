"""Measuring a weight profile: what types of matrices cost, and 8-bit activations beside them.

The base is the file's own weights decoded to float32, met by float32 activations. One matrix after
the other is replaced with what a type makes of it, and predictions are compared: that says what an
error of this matrix costs. For other types the cost is in proportion to their squared error, whose
columns count as the importance matrix says, if there is one. No product rounds activations in this,
so there is no noise that would hide small costs.

Then all matrices are of `Q8_0`, or as the file has them where they are packed. Products round
activations in one layer, or in all matrices of a kind, and else nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, MlpSpec, ModelSpec
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.quantize.rows import encode_rows
from localkv.kernels.layer_weights import LayerWeights, Linear
from localkv.kernels.places import Places
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.importance import Importance
from localkv.loader.model_fingerprint import model_hash
from localkv.loader.model_header import model_spec
from localkv.loader.quantised_format import is_quantised
from localkv.loader.tensor_reader import FileTensors, TensorReader, TensorSource, in_float32
from localkv.loader.weights import model_weights
from localkv.model import Transformer
from localkv.quality.kv_profile import ChunkCosts, OnStep, base_types
from localkv.quality.weight_profile import (
    OUTPUT,
    MatrixCosts,
    WeightProfile,
    WholeCosts,
    kind_of,
    smallest_of,
)
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import QuantFormat, split_blocks
from localkv.quant_formats.packed_tensor import PackedTensor

CLEAR = 0.02
"""The largest relative error that a matrix is measured with. With a larger one divergence no longer
grows in proportion."""
SAMPLE_VALUES = 1 << 20
"""Values of a matrix, in whole rows, that errors of types are found with."""
BESIDE_FLOATS = "q8_0"
"""The type of matrices that are floats in the file, while activations are measured."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class MadeTensors:
    """The tensors of a model, some of them made of the file's: those are copies in memory.

    Attributes:
        source: the file.
        make: what becomes of a tensor.
        names: of those that are made.
        made: they; who asks twice gets the same copy.
    """

    source: FileTensors
    make: Callable[[PackedTensor], PackedTensor]
    names: frozenset[str]
    made: dict[str, PackedTensor] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor of this shape, or a ModelFileError."""
        if name not in self.names:
            return self.source.packed(name, shape)
        if name not in self.made:
            self.made[name] = self.make(self.source.packed(name, shape))
        return self.made[name]

    def release(self, name: str) -> None:
        if name not in self.names:
            self.source.release(name)


@dataclass(frozen=True)
class WeightPlan:
    """What is to be measured.

    Attributes:
        types: of weights.
        importance: how much errors of columns count, or None.
        n_ctx: tokens of a chunk.
    """

    types: tuple[QuantFormat, ...]
    importance: Importance | None = None
    n_ctx: int = 1024


def check_measurable(config: ModelSpec) -> None:
    """Refuse models with layers that the mixing of products knows nothing of.

    Raises:
        UsageError: there is such a layer.
    """
    for layer in config.layers:
        if not isinstance(layer.mixer, AttentionSpec) or not isinstance(layer.ffn, MlpSpec):
            raise UsageError(
                f"costs of weights are measured in models of attention and dense feed-forward "
                f"blocks, and {config.architecture} has other layers",
                hint="localkv quantize gives any model another type",
            )


def layer_of(name: str, config: ModelSpec) -> int:
    """The layer of a matrix; that after the last one for embedding and output."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else config.n_layers


def measure_weights(
    gguf: GGUFFile,
    backend: Backend,
    chunk: Sequence[int],
    plan: WeightPlan,
    *,
    text: str,
    on_step: OnStep = lambda done, of, what: None,
) -> WeightProfile:
    """The profile of a model's weights.

    Args:
        chunk: token ids; the second half is scored.
        text: where they come from, for people.

    Raises:
        UsageError: the model has layers that can't be measured, or no matrix fits a type.
        LocalKVError: logits are not finite.
    """
    return _Measurement(gguf, backend, chunk, plan, on_step).profile(text)


class _Measurement:
    """One model while it is measured.

    Attributes:
        model: all of its matrices in float32, which are changed where they lie.
        values: they, by name: float32 [n_out, n_in].
        types: that each can be of.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        backend: Backend,
        ids: Sequence[int],
        plan: WeightPlan,
        on_step: OnStep,
    ) -> None:
        self.gguf, self.backend, self.plan, self.on_step = gguf, backend, plan, on_step
        self.config, self.ids = model_spec(gguf), ids
        check_measurable(self.config)
        file = FileTensors(gguf)
        found = frozenset(n for n, t in gguf.tensors.items() if is_quantised(n, t.shape))
        source = MadeTensors(file, in_float32, found)
        self.model = self._loaded(source)
        self.values = {
            name: source.made[name].rows.view(np.float32)
            for name in gguf.tensors
            if name in source.made
        }
        self.types = {
            name: [fmt for fmt in plan.types if values.shape[1] % fmt.block_size == 0]
            for name, values in self.values.items()
        }
        for name, types in self.types.items():
            if not types:
                n_in = self.values[name].shape[1]
                raise UsageError(
                    f"rows of {name} have {n_in} values, which fit none of the types",
                    hint="name one of blocks of 32, such as q8_0, too",
                )
        self.cache = CacheConfig("f16", "f16", n_ctx=plan.n_ctx)
        self.chunk = ChunkCosts(self.model, ids, self.cache)
        self.base_types = base_types(self.model)
        self.done, self.kinds = 0, tuple(dict.fromkeys(map(kind_of, self.values)))
        self.total = len(self.values) + len(plan.types) + self.config.n_layers + len(self.kinds) + 2

    def _loaded(self, source: TensorSource) -> Transformer:
        places = Places.one(self.backend, self.config.n_layers)
        read = TensorReader(source, places.embedding)
        return Transformer(self.config, model_weights(read, self.config, places=places), places)

    def _step(self, what: str) -> None:
        self.on_step(self.done, self.total, what)
        self.done += 1

    def _divergence(self, first: int = 0, model: Transformer | None = None) -> float:
        """Nats for each scored token, of layers that change nothing before `first`."""
        if model is not None:
            self.chunk.model = model
        try:
            total = self.chunk.divergence(self.base_types, first=first)
        finally:
            self.chunk.model = self.model
        return total / len(self.chunk.targets)

    def profile(self, text: str) -> WeightProfile:
        """All measurements, in turn."""
        costs = {name: self._costs(name) for name in self.values}
        whole = [self._whole(fmt, costs) for fmt in self.plan.types]
        layers, kinds, all_of_them = self._activations()
        shares = {
            name: layers[layer_of(name, self.config)] * kinds[kind_of(name)] for name in self.values
        }
        total = sum(shares.values()) or 1.0
        importance = self.plan.importance
        self.on_step(self.total, self.total, "")
        return WeightProfile(
            model=model_hash(self.gguf),
            name=self.config.name,
            text=text,
            n_tokens=len(self.ids),
            n_scored=len(self.chunk.targets),
            imatrix="" if importance is None else importance.path,
            other_bytes=sum(
                t.n_bytes for name, t in self.gguf.tensors.items() if name not in self.values
            ),
            matrices=tuple(
                MatrixCosts(
                    name,
                    (values.shape[0], values.shape[1]),
                    costs[name],
                    all_of_them * shares[name] / total,
                )
                for name, values in self.values.items()
            ),
            layers=tuple(layers),
            kinds=kinds,
            all_activations=all_of_them,
            whole=tuple(whole),
        )

    def _columns(self, name: str) -> Floats | None:
        """How much errors of the columns of a matrix count: float32 [n_in]."""
        if self.plan.importance is None:
            return None
        found = self.plan.importance.of(name, self.values[name].shape)
        return None if found is None else found[0]

    def _made(self, name: str, fmt: QuantFormat, values: Floats) -> Floats:
        """Rows of a matrix as a type has them."""
        if fmt.block_size > 1:
            rows = encode_rows(fmt, values, self._columns(name))
        else:
            (plane,) = fmt.codec.encode(np.ascontiguousarray(values))
            rows = plane.reshape(len(values), -1)
        return fmt.codec.decode(split_blocks(fmt, rows)).reshape(values.shape)

    def _costs(self, name: str) -> dict[str, float]:
        """What types of a matrix cost."""
        self._step(name)
        values = self.values[name]
        step = max(1, values.size // SAMPLE_VALUES)
        sample = np.ascontiguousarray(values[::step])
        columns = self._columns(name)
        counted = np.ones(values.shape[1], np.float32) if columns is None else columns

        def size(x: Floats) -> float:
            return float((np.square(x, dtype=np.float64).sum(0) * counted).sum())

        whole = size(sample) or 1.0
        errors = {
            fmt.name: size(self._made(name, fmt, sample) - sample) / whole
            for fmt in self.types[name]
        }
        small = [pair for pair in errors.items() if pair[1] <= CLEAR]
        anchor = max(small or [min(errors.items(), key=_second)], key=_second)
        if not anchor[1]:
            return dict.fromkeys(errors, 0.0)
        kept = values.copy()
        values[:] = self._made(name, FORMATS[anchor[0]], kept)
        layer = layer_of(name, self.config) % self.config.n_layers
        is_output = name == "output.weight"
        is_first = name in ("token_embd.weight", "per_layer_token_embd.weight")
        first = 0 if is_first else self.config.n_layers - 1 if is_output else layer
        cost = self._divergence(first)
        values[:] = kept
        return {kind: error / anchor[1] * cost for kind, error in errors.items()}

    def _whole(self, fmt: QuantFormat, costs: Mapping[str, Mapping[str, float]]) -> WholeCosts:
        """All matrices in one type, together."""
        self._step(f"all matrices in {fmt.name}")
        kept, predicted = dict[str, Floats](), 0.0
        for name, values in self.values.items():
            own = fmt
            if fmt.name not in costs[name]:
                own = smallest_of(fmt, values.shape[1], [FORMATS[n] for n in costs[name]])
            kept[name] = values.copy()
            values[:] = self._made(name, own, kept[name])
            predicted += costs[name][own.name]
        verified = self._divergence()
        for name, values in self.values.items():
            values[:] = kept[name]
        return WholeCosts(fmt.name, predicted, verified)

    def _activations(self) -> tuple[list[float], dict[str, float], float]:
        """What 8-bit activations cost by layer (the output last), by kind, and everywhere."""
        is_packed = {name: self.gguf.tensors[name].format.block_size > 1 for name in self.values}
        q8 = FORMATS[BESIDE_FLOATS]

        def packed(tensor: PackedTensor) -> PackedTensor:
            if tensor.format.block_size > 1 or tensor.shape[-1] % q8.block_size:
                return tensor
            return PackedTensor(q8, encode_rows(q8, tensor.decode()), tensor.shape)

        source = MadeTensors(FileTensors(self.gguf), packed, frozenset(self.values))
        rounding = self._loaded(source)
        for name, values in self.values.items():
            if not is_packed[name] and source.made[name].format is q8:
                values[:] = source.made[name].decode()
        self._step("predictions with exact activations")
        del self.chunk
        self.chunk = ChunkCosts(self.model, self.ids, self.cache)
        own, theirs = self.model.weights, rounding.weights

        def mixed(layers: Sequence[LayerWeights], output: Linear) -> Transformer:
            weights = replace(own, layers=tuple(layers), output=output)
            return Transformer(self.config, weights, self.model.places)

        by_layer = list[float]()
        for i in range(self.config.n_layers):
            self._step(f"8-bit activations in layer {i}")
            layers = [*own.layers[:i], theirs.layers[i], *own.layers[i + 1 :]]
            by_layer.append(self._divergence(i, mixed(layers, own.output)))
        by_kind = dict[str, float]()
        for kind in self.kinds:
            self._step(f"8-bit activations of {kind}")
            layers = [of_kind(kind, a, b) for a, b in zip(own.layers, theirs.layers, strict=True)]
            output = theirs.output if kind == OUTPUT else own.output
            by_kind[kind] = self._divergence(0, mixed(layers, output))
        by_layer.append(by_kind.get(OUTPUT, 0.0))
        self._step("8-bit activations everywhere")
        everywhere = self._divergence(0, mixed(theirs.layers, theirs.output))
        return by_layer, by_kind, everywhere


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


_FIELDS = {"attn_output": "output"}
"""Fields of a layer's weights that have another name than their tensors."""


def of_kind(kind: str, layer: LayerWeights, other: LayerWeights) -> LayerWeights:
    """A layer with the matrices of one kind from another one; those that a file keeps in one matrix
    are of its kind."""
    wanted = ("attn_q", "attn_k", "attn_v") if kind == "attn_qkv" else (_FIELDS.get(kind, kind),)

    def mixed(ours: Any, theirs: Any) -> Any:
        changed = {
            one.name: getattr(theirs, one.name)
            for one in fields(ours)
            if one.name in wanted and isinstance(getattr(ours, one.name), Linear)
        }
        return replace(ours, **changed) if changed else ours

    return replace(layer, mixer=mixed(layer.mixer, other.mixer), ffn=mixed(layer.ffn, other.ffn))
