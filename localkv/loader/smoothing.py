"""Smoothing: large channels made smaller before they are rounded, inside the weights.

A type with a scale for several channels loses the small ones beside a large one. Dividing K's
channels and multiplying q's, V's and the columns of `attn_output`, leaves the model as it is
(SmoothAttention: QServe, arXiv:2405.04532, section 5.2). The factors are folded into weights while
these are loaded (`channel_factors`), so they cost nothing afterwards. All are powers of two: the
exponents of weights and of scales of blocks change and nothing else, so logits stay the same bits
(but for fp16 numbers below 2 ** -14, which are rounded).

Keys that are multiplied channel by channel, and queries that are divided, have the same products.
RoPE mixes the two channels of a pair, which therefore share a factor; a norm of heads that has one
weight for all of them makes all heads share theirs. Values that are multiplied need columns of
`attn_output` that are divided. An outlier twin (`models/outliers.py`) makes channels larger in the
same way.

Products with packed weights round their input to 8 bits, 32 values to a scale. There an outlier
costs the 31 values beside it. So when a file is made, channels of such an input (`MatrixInput`) are
divided in a norm's weight or in the rows of `ffn_up`. Columns of what reads it are multiplied
(SmoothQuant: arXiv:2211.10438, section 4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec
from localkv.cache.profile import KVProfile
from localkv.config import CacheConfig
from localkv.errors import ModelFileError
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.tensor_reader import TensorSource
from localkv.quant_formats.packed_tensor import PackedTensor, can_scale_rows, is_float, scaled

Factors = NDArray[np.float32]
"""Factors of a layer's K or V: [n_kv_heads, channels]."""


def attention_layers(config: ModelSpec) -> dict[int, AttentionSpec]:
    """The attention of grouped queries of each layer that has some."""
    found = dict[int, AttentionSpec]()
    for i, layer in enumerate(config.layers):
        for mixer in (layer.mixer, layer.beside):
            if isinstance(mixer, AttentionSpec):
                found[i] = mixer
    return found


def readers(config: ModelSpec, layer: int) -> dict[int, AttentionSpec]:
    """The layers whose queries meet the K of `layer`: itself, and those that have none."""
    layers = attention_layers(config)
    return {i: spec for i, spec in layers.items() if layer in (i, spec.kv_from)}


def pairs_of_channels(spec: AttentionSpec) -> NDArray[np.int64]:
    """The channel that shares a factor with each: [key_dim], itself where RoPE leaves it."""
    partners = np.arange(spec.key_dim)
    rope = spec.rope or RopeSpec(0)
    n_pairs = rope.n_dims // 2
    i = np.arange(n_pairs)
    first, second = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + n_pairs)
    partners[first], partners[second] = second, first
    return partners


def share_heads(config: ModelSpec, layer: int) -> bool:
    """Whether all heads of a layer's K have the same factors, since a norm's weight is theirs."""
    return any(
        norm is not None and norm.span == "head"
        for spec in readers(config, layer).values()
        for norm in (spec.q_norm, spec.k_norm)
    )


def k_can_change(config: ModelSpec, layer: int) -> bool:
    """Whether there are weights for the factors: a norm without weights has no place for them."""
    return all(
        norm is None or norm.tensor
        for spec in readers(config, layer).values()
        for norm in (spec.q_norm, spec.k_norm)
    )


def v_can_change(config: ModelSpec, layer: int) -> bool:
    """Whether V is a product of rows of its own, and no norm follows."""
    spec = attention_layers(config)[layer]
    return spec.v_norm is None and not spec.value_from_key


def channel_factors(
    config: ModelSpec, names: Collection[str], k: Mapping[int, Factors], v: Mapping[int, Factors]
) -> dict[str, Factors]:
    """What each tensor that changes is multiplied with, in a shape that broadcasts.

    Args:
        names: the tensors of the model.
        k, v: what K and V of layers are to be multiplied with; heads that share a norm's weight and
            channels of a RoPE pair have equal factors.
    """
    found = dict[str, Factors]()
    for i, spec in attention_layers(config).items():
        stored = i if spec.kv_from is None else spec.kv_from
        at, group = f"blk.{i}.", spec.n_heads // spec.n_kv_heads
        k_rows: Factors = k.get(stored, np.ones((spec.n_kv_heads, spec.key_dim), np.float32))
        ones = np.ones((spec.n_kv_heads, spec.value_dim), np.float32)
        v_rows: Factors = v.get(stored, ones)[:, : spec.value_dim]
        q_rows: Factors = np.repeat(1 / k_rows, group, axis=0).astype(np.float32)
        columns = np.repeat(1 / v_rows, group, axis=0).reshape(1, -1)
        found[f"{at}attn_output.weight"] = columns.astype(np.float32)
        if spec.q_norm is not None:
            found |= _of_norm(spec.q_norm, q_rows, names, at)
            q_rows = np.ones_like(q_rows)
        if spec.k_norm is not None and spec.kv_from is None:
            found |= _of_norm(spec.k_norm, k_rows, names, at)
            k_rows = np.ones_like(k_rows)
        gated = spec.gated and f"{at}attn_gate.weight" not in names
        if gated:  # of each head q, then its gate
            q_rows = np.stack((q_rows, np.ones_like(q_rows)), axis=1)
        parts: dict[str, Factors] = {"attn_q": q_rows, "attn_k": k_rows, "attn_v": v_rows}
        if f"{at}attn_qkv.weight" in names:
            parts["attn_qkv"] = np.concatenate([part.reshape(-1) for part in parts.values()])
        for name, factors in parts.items():
            found[f"{at}{name}.weight"] = factors.reshape(-1, 1)
            found[f"{at}{name}.bias"] = factors.reshape(-1)
    return {
        name: factors for name, factors in found.items() if name in names and (factors != 1).any()
    }


def _of_norm(norm: NormSpec, rows: Factors, names: Collection[str], at: str) -> dict[str, Factors]:
    """Factors of a norm's weight and bias; `rows` are [heads, channels]."""
    factors = {"head": rows[0], "heads": rows, "row": rows.reshape(-1)}[norm.span]
    weight = f"{at}{norm.tensor}"
    if weight not in names:  # PLaMo's files leave ".weight" out
        weight += ".weight"
    return {weight: factors, f"{at}{norm.tensor}.bias": factors}


Exponents = tuple[tuple[int, ...], ...]
"""A layer's exponents of K or V: [n_kv_heads][channels]; a channel is divided by 2 ** exponent."""

ALPHA = 0.5
"""Strength (SmoothQuant's alpha, arXiv:2211.10438, section 4; QServe takes 0.5 for keys)."""

MOST = 8
"""The largest exponent, up or down."""
LEAST = 2.0**-30
"""Smaller sizes are taken for this one."""

Sizes = NDArray[np.floating[Any]]
"""[n_kv_heads, channels]."""


@dataclass(frozen=True)
class Smoothing:
    """How K and V of a model are smoothed.

    Attributes:
        alpha: the strength that the exponents were made with.
        k, v: of layers; those that are missing stay as they are.
    """

    alpha: float
    k: Mapping[int, Exponents]
    v: Mapping[int, Exponents]

    @classmethod
    def of_profile(cls, profile: KVProfile) -> Smoothing:
        """What a profile was measured with."""
        layers = [(i, layer) for i, layer in enumerate(profile.layers) if layer is not None]
        return cls(
            profile.smoothing,
            {i: layer.k.exponents for i, layer in layers if layer.k.exponents},
            {i: layer.v.exponents for i, layer in layers if layer.v.exponents},
        )

    @classmethod
    def in_use(cls, cache: CacheConfig, profile: KVProfile | None) -> Smoothing | None:
        """The smoothing that a cache is for; None for none (`cache/profile.py`)."""
        return cls.of_profile(profile) if profile is not None and cache.smoothing else None

    def tensor_factors(self, config: ModelSpec, names: Collection[str]) -> dict[str, Factors]:
        """What each tensor that changes is multiplied with (`channel_factors`)."""
        return channel_factors(config, names, _factors(self.k), _factors(self.v))


def changed_tensors(
    smoothing: Smoothing | None, config: ModelSpec, names: Collection[str]
) -> frozenset[str]:
    """The names of tensors that smoothing copies into memory."""
    return frozenset(smoothing.tensor_factors(config, names) if smoothing else ())


NO_SMOOTHING = Smoothing(0.0, {}, {})


def _factors(exponents: Mapping[int, Exponents]) -> dict[int, Factors]:
    return {i: np.exp2(-np.array(layer, np.float32)) for i, layer in exponents.items()}


def smoothing_of(
    config: ModelSpec,
    tensors: Mapping[str, TensorInfo],
    k: Mapping[int, Sizes],
    v: Mapping[int, Sizes],
    alpha: float = ALPHA,
    *,
    q: Mapping[int, Sizes] | None = None,
) -> Smoothing:
    """Smoothing of all layers whose weights can hold it.

    A channel is divided by its size to the power of alpha. K's is also multiplied with the size of
    the queries that meet it to the power of 1 - alpha, if that is known. The reason is that an
    error e of a rotated row of K is alike in all channels and as large as the row. So its logits
    err by the root of the product of two sums, one over (q s)^2 and one over (K / s)^2. That is
    least where s^2 is K / q. What is multiplied and divided by a power of two in a model then
    doesn't matter at all, as both sizes show it.

    The others are left out: K where a norm has no weights or a type no scales of blocks
    (`can_scale_rows`), V where a norm follows, or `attn_output` is packed (its blocks run along a
    row, across the columns that would be multiplied).

    Args:
        tensors: the tensors of the model's file.
        k, v: each layer's magnitudes in the cache by channel: [n_kv_heads, channels], K after
            RoPE. Root mean squares of K if there is `q`.
        alpha: 1 makes all channels alike, 0 leaves them, or makes the queries' channels alike.
        q: magnitudes of queries, all heads that meet a head of K together.

    Raises:
        ValueError: alpha is not between 0 and 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is between 0 and 1, not {alpha}")
    of_k, of_v = dict[int, Exponents](), dict[int, Exponents]()
    for layer, spec in attention_layers(config).items():
        if spec.kv_from is not None:
            continue
        if layer in k and k_can_change(config, layer):
            shared = share_heads(config, layer)
            if q is None:
                of_k[layer] = _exponents(_largest(k[layer], spec, shared), alpha)
            else:
                keys, queries = (_root_of_squares(x[layer], spec, shared) for x in (k, q))
                of_k[layer] = _exponents(keys, alpha, queries)
        if layer in v and v_can_change(config, layer):
            of_v[layer] = _exponents(np.asarray(v[layer], np.float64), alpha)
    for sides, side in ((of_k, "k"), (of_v, "v")):
        for layer in list(sides):
            alone = Smoothing(alpha, **{"k": {}, "v": {}, side: {layer: sides[layer]}})
            if not can_fold(alone.tensor_factors(config, tensors), tensors):
                del sides[layer]
    return Smoothing(alpha, of_k, of_v)


def _largest(sizes: Sizes, spec: AttentionSpec, shared: bool) -> NDArray[np.float64]:
    """The largest of the channels of K that share a factor."""
    found: NDArray[np.float64] = np.asarray(sizes, np.float64)
    found = np.maximum(found, found[:, pairs_of_channels(spec)])
    if shared:
        found = np.broadcast_to(found.max(0), found.shape)
    return found


def _root_of_squares(sizes: Sizes, spec: AttentionSpec, shared: bool) -> NDArray[np.float64]:
    """The root of the sum of squares of the channels of K, or of q, that share a factor."""
    squares = np.square(np.asarray(sizes, np.float64))
    squares = squares + squares[:, pairs_of_channels(spec)]
    if shared:
        squares = np.broadcast_to(squares.sum(0), squares.shape)
    found: NDArray[np.float64] = np.sqrt(squares)
    return found


def _exponents(
    sizes: NDArray[np.float64], alpha: float, others: NDArray[np.float64] | None = None
) -> Exponents:
    """Exponents of channels, about their mean: so scales of a layer as a whole stay as they are.

    Args:
        others: sizes of what channels are multiplied with.
    """
    counted, logs = sizes > 0, alpha * np.log2(np.maximum(sizes, LEAST))
    if others is not None:
        counted = counted & (others > 0)
        logs = logs - (1 - alpha) * np.log2(np.maximum(others, LEAST))
    mean = logs.mean(where=counted) if counted.any() else 0.0
    # rounded about the place between whole numbers where most are: that is the same place if some
    # channels are larger by a power of two, and their exponents are larger by as much
    turns = np.exp(2j * np.pi * logs).sum(where=counted)
    offset = np.angle(turns) / (2 * np.pi)
    exponents = np.rint(logs - offset) - np.rint(mean - offset)
    exponents = np.where(counted, exponents, 0).clip(-MOST, MOST)
    return tuple(tuple(row) for row in exponents.astype(int).tolist())


def can_fold(factors: Mapping[str, Factors], tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether tensors of these types can be multiplied with factors like these."""
    return all(
        is_float(tensors[name].format)
        or (can_scale_rows(tensors[name].format) and by.shape[-1] == 1)
        for name, by in factors.items()
    )


@dataclass(frozen=True)
class SmoothedTensors:
    """The tensors of a model, some of them multiplied: those are copies in memory.

    Attributes:
        source: where they come from.
        factors: of tensors by name (`Smoothing.tensor_factors`).
    """

    source: TensorSource
    factors: Mapping[str, Factors]

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        """A tensor of this shape.

        Raises:
            ModelFileError: it is missing, of another shape, or its factors don't fit its type.
        """
        tensor = self.source.packed(name, shape)
        factors = self.factors.get(name)
        if factors is None:
            return tensor
        try:
            return scaled(tensor, factors)
        except ValueError as error:
            raise ModelFileError(f"tensor {name!r} can't be smoothed: {error}") from error

    def release(self, name: str) -> None:
        self.source.release(name)


SMOOTHED = "quantize.smoothing"
"""A file's key: the alpha that inputs of its matrices were smoothed with."""


@dataclass(frozen=True)
class MatrixInput:
    """What one or several matrices are multiplied with.

    Attributes:
        makers: the tensors that its channels are proportional to: a norm's weight and bias, or a
            matrix with a row for each channel.
        readers: the matrices.
    """

    makers: tuple[str, ...]
    readers: tuple[str, ...]

    def tensor_factors(
        self, channels: Factors, tensors: Mapping[str, TensorInfo]
    ) -> dict[str, Factors]:
        """What each tensor is multiplied with, in a shape that broadcasts, so that channels are
        multiplied with `channels` [n_in] and the matrices' products stay."""
        rows = {
            name: channels.reshape(-1, 1) if len(tensors[name].shape) > 1 else channels
            for name in self.makers
        }
        columns = (1 / channels).astype(np.float32).reshape(1, -1)
        return rows | dict.fromkeys(self.readers, columns)


def matrix_inputs(config: ModelSpec, tensors: Mapping[str, TensorInfo]) -> list[MatrixInput]:
    """The inputs of matrices that can be smoothed.

    They are what the norms before attention and before dense feed-forward blocks make, and what
    the last matrix of a gated block reads. Left out are inputs that anything else reads, too. The
    output matrix is also left out: embeddings are what its norm gives. So is `attn_output`, whose
    input costs least by far.

    Args:
        tensors: the tensors of the model's file.
    """
    found = list[MatrixInput]()
    if config.altup is not None or config.is_encoder:
        return found
    for i, layer in enumerate(config.layers):
        if layer.parallel or layer.beside is not None or layer.laurel is not None:
            continue
        at = f"blk.{i}."
        if isinstance(layer.mixer, AttentionSpec):
            readers = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_gate")
            found += _after_norm(layer.attn_norm, readers, tensors, at)
        if isinstance(layer.ffn, MlpSpec):
            found += _after_norm(layer.ffn_norm, ("ffn_gate", "ffn_up"), tensors, at)
            found += _of_last_matrix(layer, layer.ffn, tensors, at)
    return found


def _after_norm(
    norm: NormSpec | None, readers: tuple[str, ...], tensors: Mapping[str, TensorInfo], at: str
) -> list[MatrixInput]:
    if norm is None or not norm.tensor:
        return []
    makers = _of_norm(norm, np.ones((1, 1), np.float32), tensors, at)
    names = tuple(f"{at}{name}.weight" for name in readers)
    return [_present((*makers,), names, tensors)]


def _of_last_matrix(
    layer: LayerSpec, ffn: MlpSpec, tensors: Mapping[str, TensorInfo], at: str
) -> list[MatrixInput]:
    """The input of `ffn_down`, if it is proportional to what `ffn_up` gives."""
    is_clamped = ffn.limit or ffn.activation == "swiglu_oai"
    gate, up = (f"{at}ffn_{name}" for name in ("gate", "up"))
    if not ffn.gated or is_clamped or layer.hidden_norm is not None:
        return []
    if f"{gate}.weight" not in tensors:  # one tensor has the rows of both
        return []
    return [_present((f"{up}.weight", f"{up}.bias"), (f"{at}ffn_down.weight",), tensors)]


def _present(
    makers: tuple[str, ...], readers: tuple[str, ...], tensors: Mapping[str, TensorInfo]
) -> MatrixInput:
    return MatrixInput(
        tuple(name for name in makers if name in tensors),
        tuple(name for name in readers if name in tensors),
    )


def input_channels(sizes: Sizes, columns: Sizes, alpha: float = ALPHA) -> Factors:
    """What the channels of an input are multiplied with: float32 [n_in], powers of two.

    A channel is divided by its size to the power of alpha, and multiplied with the size of its
    columns to the power of 1 - alpha.

    Args:
        sizes: root mean squares of the input's channels: [n_in].
        columns: root mean squares of its matrices' columns: [n_in].
    """
    (exponents,) = _exponents(
        np.asarray(sizes[None], np.float64), alpha, np.asarray(columns[None], np.float64)
    )
    return np.exp2(-np.array(exponents, np.float32))
