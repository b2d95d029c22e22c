"""The activations that meet each matrix of a model while it reads a text.

A model that is watched runs its backend's operations one by one, without fusion, and rounds as the
backend does. Whoever watches is given all rows that a matrix is multiplied with, under the names of
the file's tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.cache.arrays import Array, Batch
from localkv.cache.kv_cache import KVCache
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import Logits, TokenScores
from localkv.errors import LocalKVError, UsageError, quoted
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights
from localkv.loader.error_feedback import FIRST_SHARE, Moments
from localkv.loader.importance import Sums
from localkv.model import ModelWeights, Transformer
from localkv.quality.scores import first_scored, n_scored, score_chunk

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Met:
    """What meets rows.

    Attributes:
        names: the file's tensors, one or several that the model multiplies together.
        n_parts: matrices of the stack that it is; 1 for a matrix.
        routed: each of these meets the rows that are routed to it. Otherwise all of them meet as
            many rows.
    """

    names: tuple[str, ...]
    n_parts: int = 1
    routed: bool = False


OnRows = Callable[[Met, int, Floats], None]
"""(what meets them, the number of a stack's matrix, rows [n, n_in], valid until it returns)"""


def watched(model: Transformer, on_rows: OnRows) -> Transformer:
    """A model with the same weights that hands on all activations that meet its matrices.

    Every token of a batch goes through all layers, whether its logits are wanted or not. Rows are
    float32, as they are before a product rounds them.

    Raises:
        UsageError: the backend has no operations of this kind, or the model is an encoder.
    """
    backend = model.backend
    if backend.watched is None:
        raise UsageError(
            f"activations can't be read on device {backend.name}", hint="use --device cpu"
        )
    if model.config.is_encoder:
        raise UsageError("activations of encoders can't be read")
    met = what_meets(model.weights)

    def tell(weight: object, rows: Array, part: int | None) -> None:
        what = met.get(id(weight))
        if what is not None:
            on_rows(what, part or 0, backend.arrays.to_numpy(rows))

    own = backend.watched(tell)
    same = {name: getattr(backend, name) for name in ("embed", "late", "turns", "prepare")}
    return _EveryRow(model.config, model.weights, replace(own, **same))


def read_chunks(
    model: Transformer,
    chunks: Sequence[Sequence[int]],
    cache: CacheConfig,
    on_rows: OnRows,
    *,
    n_batch: int = 512,
    with_output: bool = False,
    scored: bool = False,
) -> Iterator[TokenScores | None]:
    """Run a model over chunks of a text while `on_rows` is given what meets its matrices.

    Args:
        chunks: token ids; each is a sequence of its own, and all of its tokens are evaluated.
        cache: of K and V.
        n_batch: most tokens evaluated at a time.
        with_output: the output matrix meets all rows, too.
        scored: predictions of each chunk's second half are scored.

    Yields:
        after each chunk its scores, or None.

    Raises:
        UsageError: see `watched`.
    """
    watching = watched(model, on_rows)
    for chunk in chunks:
        engine = Engine(watching, cache, n_batch=n_batch)
        start = first_scored(len(chunk)) if scored else len(chunk) - 1
        first = 0 if with_output else start
        parts = map(model.backend.arrays.to_numpy, engine.logit_batches(chunk, first=first))
        if scored:
            yield score_chunk(chunk, _rows_between(parts, start - first, n_scored(len(chunk))))
        else:
            for _ in parts:
                pass
            yield None


def _rows_between(parts: Iterator[Logits], skipped: int, wanted: int) -> Iterator[Logits]:
    """Some of the rows of all parts; the others are asked for, too."""
    at = -skipped
    for part in parts:
        rows = part[max(0, -at) : max(0, wanted - at)]
        at += len(part)
        if len(rows):
            yield rows


class _EveryRow(Transformer):
    """Runs all tokens through the last layer, too."""

    def forward(self, batch: Batch, cache: KVCache, rows: Array | None = None) -> Array:
        return self.forward_with_hidden(batch, cache)[0]


def what_meets(weights: ModelWeights) -> dict[int, Met]:
    """By the `id` of a weight or a norm that `Tell` is given, what meets rows.

    Older files have one tensor of what makes keys and values of latents (`attn_kv_b`). Its columns
    meet the latents, which a norm makes. The stacks that are made of it meet other rows. Several
    matrices may have parts of one tensor's rows, such as q, K and V. Activations that meet all of
    them count once.
    """
    met = {key: Met(names) for key, names in weights.names.items()}
    for number, layer in enumerate(weights.layers):
        _add_experts(met, number, layer)
        mixer = layer.mixer
        if isinstance(mixer, LatentAttentionWeights):
            k_b, v_b = id(mixer.attn_k_b), id(mixer.attn_v_b)
            if met[k_b] == met[v_b]:
                met[id(mixer.attn_kv_a_norm)] = met.pop(k_b)
                del met[v_b]
                continue
            for stack in (mixer.attn_k_b, mixer.attn_v_b):
                met[id(stack)] = replace(met[id(stack)], n_parts=stack.shape[0])
    seen = set[str]()
    for key, what in met.items():
        met[key] = replace(what, names=tuple(name for name in what.names if name not in seen))
        seen.update(what.names)
    return met


def _add_experts(met: dict[int, Met], number: int, layer: LayerWeights) -> None:
    moe = layer.moe
    if moe is None:
        return
    for stack in (moe.ffn_gate_exps, moe.ffn_up_exps, moe.ffn_down_exps, moe.ffn_gate_up_exps):
        if stack is not None:
            met[id(stack)] = Met(met[id(stack)].names, stack.shape[0], routed=True)
    if moe.ffn_gate_inp_shexp is not None:
        met[id(moe.ffn_gate_inp_shexp)] = Met((f"blk.{number}.ffn_gate_inp_shexp.weight",))


class Squares:
    """Sums of the squares of all activations that meet each column of each matrix.

    Args:
        wanted: whether a tensor is measured, by its name.
    """

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._found = dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]]()
        self._last: tuple[Any, Floats] | None = None

    def add(self, met: Met, part: int, rows: Floats) -> None:
        """An `OnRows`.

        Raises:
            LocalKVError: a value is infinite or not a number.
        """
        names = [name for name in met.names if self._wanted(name)]
        if not names:
            return
        squares = self._squares(rows)
        for name in names:
            if name not in self._found:
                sums = np.zeros((met.n_parts, rows.shape[-1]))
                counts = np.zeros(met.n_parts if met.routed else 1, np.int64)
                self._found[name] = sums, counts
            sums, counts = self._found[name]
            sums[part] += squares
            if not np.isfinite(squares).all():
                raise LocalKVError(f"activations that meet {quoted(name)} are not finite")
            if met.routed or part == 0:
                counts[part] += len(rows)

    def _squares(self, rows: Floats) -> Floats:
        """The sums of a batch: float32 [n_in]. Several matrices are given the same rows."""
        if self._last is None or self._last[0] is not rows:
            self._last = rows, np.einsum("ij,ij->j", rows, rows)
        return self._last[1]

    @property
    def sums(self) -> Mapping[str, Sums]:
        """By tensors' names."""
        return {
            name: Sums(sums.astype(np.float32).reshape(-1), counts)
            for name, (sums, counts) in self._found.items()
        }


MOMENT_BYTES = 2 << 30
"""Most bytes of sums that are kept at a time; the text is read again for further layers."""


class TextMoments:
    """Second moments of the rows that meet the matrices of layers, over a text.

    As many layers are measured at a time as there is room for, from the one that is asked for on.

    Args:
        chunks: token ids, at least two of each; each is a sequence of its own.
        cache: of K and V, of at least the longest chunk.
        widths: n_in of each matrix that will be asked for, by its name.
        on_chunk: called with the chunks that are read, of how many.
    """

    def __init__(
        self,
        model: Transformer,
        chunks: Sequence[Sequence[int]],
        cache: CacheConfig,
        widths: Mapping[str, int],
        on_chunk: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._model, self._chunks, self._cache = model, chunks, cache
        self._on_chunk = on_chunk
        self._widths = dict[int, dict[str, int]]()
        for name, width in widths.items():
            if (layer := _layer_of(name)) is not None:
                self._widths.setdefault(layer, {})[name] = width
        self._measured = range(0)
        self._sums = dict[str, _Products]()
        self._made: tuple[_Products, Moments] | None = None

    def of(self, name: str) -> Moments | None:
        """The moments of a matrix; None if it is of no layer, or met nothing.

        Raises:
            LocalKVError: an activation is not finite.
        """
        layer = _layer_of(name)
        if layer is None or name not in self._widths.get(layer, {}):
            return None
        if layer not in self._measured:
            self._measure(layer)
        sums = self._sums.get(name)
        if sums is None:
            return None
        if self._made is None or self._made[0] is not sums:
            mean = sums.mean
            if not np.isfinite(mean).all():
                raise LocalKVError(f"activations that meet {quoted(name)} are not finite")
            self._made = sums, Moments.of_mean(mean)
        return self._made[1]

    def _measure(self, first: int) -> None:
        self._sums, end, left = {}, first, MOMENT_BYTES
        while end < self._model.config.n_layers:
            left -= sum(8 * width * width for width in self._widths.get(end, {}).values())
            if left < 0 and end > first:
                break
            end += 1
        self._measured = range(first, end)
        wanted = {name for layer in self._measured for name in self._widths.get(layer, {})}
        last: tuple[Floats, _Products] | None = None

        def on_rows(met: Met, part: int, rows: Floats) -> None:
            nonlocal last
            names = [name for name in met.names if name in wanted]
            if not names:
                return
            if last is None or last[0] is not rows:
                own = self._sums.get(names[0]) or _Products(rows.shape[-1])
                own.add(rows)
                last = rows, own
            for name in names:  # several matrices meet the same rows
                self._sums[name] = last[1]

        reading = read_chunks(
            self._model.first_layers(end),
            self._chunks,
            self._cache,
            on_rows,
            n_batch=max(map(len, self._chunks)),
        )
        for done, _ in enumerate(reading, 1):
            self._on_chunk(done, len(self._chunks))


class _Products:
    """Sums of x^T x, float32 [n_in, n_in]: of the first tokens of chunks, and of the others."""

    def __init__(self, n_in: int) -> None:
        self.first, self.others = (np.zeros((n_in, n_in), np.float32) for _ in range(2))
        self.n_chunks = self.n_others = 0

    def add(self, rows: Floats) -> None:
        """Add a whole chunk."""
        first, others = rows[:1], rows[1:]
        self.first += first.T @ first
        self.others += others.T @ others
        self.n_chunks += 1
        self.n_others += len(others)

    @property
    def mean(self) -> Floats:
        """The mean over other tokens, with the share of first ones: float32 [n_in, n_in]."""
        share = np.float32(FIRST_SHARE / self.n_chunks)
        return self.others / np.float32(self.n_others) + share * self.first


def _layer_of(name: str) -> int | None:
    found = re.match(r"blk\.(\d+)\.", name)
    return None if found is None else int(found[1])
