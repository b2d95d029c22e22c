"""The activations that meet each matrix of a model while it reads a text.

A model that is watched runs its backend's operations one by one, without fusion, and rounds as the
backend does. Whoever watches is given all rows that a matrix is multiplied with, under the names of
the file's tensors.
"""

from __future__ import annotations

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
