"""Attention of grouped queries on the CPU: norm, q, k, v, RoPE and the store as one chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import AttentionSpec, EncoderAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache, SegmentBatch
from localkv.kernels.attention import (
    SegmentAttention,
    attention,
    merge_segments,
    pack_groups,
    store_rotated,
)
from localkv.kernels.attention_mixers import attend_texts
from localkv.kernels.backend import Mix, TokenInputs
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layers.chains import (
    RESIDUALS,
    ROW_STEPS,
    LayerChains,
    activation_worker,
    runs,
)
from localkv.kernels.cpu.linear.jobs import (
    MOST_PARTS,
    AttentionGateJob,
    ClampJob,
    MergeJob,
    RopeJob,
    SinkJob,
    SplitJob,
)
from localkv.kernels.cpu.linear.products import add_products, with_bias
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Where
from localkv.kernels.cpu.store.store_kv import (
    add_store,
    packs_groups,
    rotate_cpu,
    store_groups_cpu,
    store_kv_cpu,
    stored_rows,
)
from localkv.kernels.layer_weights import AttentionWeights, LayerWeights, Norm
from localkv.simd import LANES
from localkv.system.threads import n_threads


class StoredRows:
    """`stored_rows`, which are looked at once for all layers whose caches are alike."""

    def __init__(self) -> None:
        self._last: (
            tuple[tuple[SegmentBatch, ...], list[int], dict[str, int | NDArray[Any]]] | None
        ) = None

    def of(
        self, cache: LayerCache, segments: tuple[SegmentBatch, ...], n_tokens: int
    ) -> dict[str, int | NDArray[Any]]:
        """What a chain is given of a batch's rows."""
        n_pages, last = [len(segment.k[0]) for segment in cache.segments], self._last
        if last is None or last[1] != n_pages or not _are_same(last[0], segments):
            last = self._last = segments, n_pages, stored_rows(cache, segments, n_tokens)
        return last[2]


def _are_same(a: tuple[SegmentBatch, ...], b: tuple[SegmentBatch, ...]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _projections(weights: AttentionWeights) -> tuple[Any, ...]:
    """The projections that a layer has; one that stores nothing has only q's."""
    layers = (weights.attn_q, weights.attn_k, weights.attn_v, weights.attn_gate)
    return tuple(layer for layer in layers if layer is not None)


def is_stored_at_once(cache: LayerCache) -> bool:
    """Whether a chain can store rows in it."""
    at_once = [segment for segment in cache.segments if not packs_groups(segment)]
    scaled = any(s.scale_k is not None or s.scale_v is not None for s in at_once)
    return not scaled


def add_sinks(
    chain: Chain, out: Where, lse: Where, sinks: Floats, shape: tuple[int, int, int]
) -> None:
    """What attention summed, out [tokens, n_heads, head_dim], shared with sinks, in its place."""
    n_tokens, n_heads, size = shape
    rows = n_tokens * n_heads
    where = Memory(out, 4 * rows * size), Memory(lse, 4 * rows), Memory(sinks, 4 * n_heads)
    job = SinkJob(0, n_tokens, n_heads, size, *where)
    chain.add(specialized(ROW_STEPS)["sinks"], job, min(n_threads(), n_tokens))


def add_merge(
    chain: Chain,
    parts: Sequence[tuple[Where, Where]],
    sinks: Floats | None,
    shape: tuple[int, int, int],
) -> None:
    """What attention summed in several segments, merged in the place of the first."""
    n_tokens, n_heads, size = shape
    rows = n_tokens * n_heads
    more: list[Item] = [0] * (MOST_PARTS - len(parts))
    job = MergeJob(
        0,
        n_tokens,
        n_heads,
        size,
        len(parts),
        0 if sinks is None else Memory(sinks, 4 * n_heads),
        *[Memory(out, 4 * rows * size) for out, _ in parts],
        *more,
        *[Memory(lse, 4 * rows) for _, lse in parts],
        *more,
    )
    chain.add(specialized(ROW_STEPS)["merged"], job, min(n_threads(), n_tokens))


def gate_width(attn: AttentionSpec) -> int:
    """Values per token of the gate of attention's output, 0 if it has none."""
    if attn.gated:
        return attn.width
    return attn.n_heads if attn.head_gated else 0


def add_gate(chain: Chain, gate: Where, out: Where, n_tokens: int, attn: AttentionSpec) -> None:
    """Multiply `out` by the gate's activation, in place."""
    job = AttentionGateJob(
        next_row=0,
        n_rows=n_tokens,
        n_heads=attn.n_heads,
        head_dim=attn.value_dim,
        x=Memory(out, 4 * n_tokens * attn.width),
        gate=Memory(gate, 4 * n_tokens * gate_width(attn)),
        is_by_head=int(attn.head_gated),
        is_softplus=int(attn.gate_activation == "softplus"),
    )
    chain.add(specialized(RESIDUALS)["gates"], job, min(n_threads(), n_tokens))


class AttentionLayer:
    """A mixer of attention, one of `Backend.mixers`.

    Args:
        composed: for layers whose matrices have no kernel.
        attention: over packed K and V.
    """

    def __init__(self, chains: LayerChains, composed: Mix, attention: SegmentAttention) -> None:
        self.chains = chains
        self.composed = composed
        self.attention = attention
        self.stored = StoredRows()
        self.without_sinks = object()

    def __call__(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Floats:
        weights, attn = layer.attention, spec.attention
        if not self.is_fused(layer, attn):
            return np.asarray(self.composed(x, layer, spec, inputs, cache, batch))
        n_tokens = len(x)
        gate = np.empty((n_tokens, width), np.float32) if (width := gate_width(attn)) else None
        q = self._store(x, layer, spec, inputs, cache, cache.rows_of(batch), gate)
        out: Floats = attention(
            self.attention,
            q,
            cache,
            batch,
            attn.params,
            weights.sinks,
            rotate=rotate_cpu,
            merge=self.merged,
        )
        out = out.reshape(n_tokens, -1)
        if attn.output_scale != 1.0:
            out *= np.float32(attn.output_scale)
        return out if gate is None else self._gated(gate, out, attn)

    def is_fused(self, layer: LayerWeights, attn: AttentionSpec) -> bool:
        """Whether a chain can run its products."""
        size = attn.key_dim
        return (
            runs(*_projections(layer.attention))
            and size == attn.value_dim
            and not (gate_width(attn) and size % LANES)
        )

    def merged(self, parts: list[tuple[Floats, Floats]], sinks: Floats | None) -> Floats:
        """What `merge_segments` gives, in the place of the first."""
        out, lse = parts[0]
        n_tokens, n_heads, size = shape = out.shape
        if size % LANES or len(parts) > MOST_PARTS:
            merged: Floats = merge_segments(parts, sinks)
            return merged
        if len(parts) == 1:
            if sinks is not None:

                def share(chain: Chain) -> None:
                    add_sinks(chain, "out", "lse", sinks, shape)

                self.chains.get("sinks", (sinks,), n_tokens, share, size).run(out=out, lse=lse)
            return out

        def merge(chain: Chain) -> None:
            named = [(f"out{i}", f"lse{i}") for i in range(len(parts))]
            add_merge(chain, named, sinks, shape)

        made_for = (self.without_sinks if sinks is None else sinks,)
        chain = self.chains.get("merge", made_for, n_tokens, merge, n_heads, size, len(parts))
        values = dict[str, Floats]()
        for i, (out, lse) in enumerate(parts):
            values |= {f"out{i}": out, f"lse{i}": lse}
        chain.run(**values)
        return parts[0][0]

    def _gated(self, gate: Floats, out: Floats, attn: AttentionSpec) -> Floats:
        """See `add_gate`."""

        def make(chain: Chain) -> None:
            add_gate(chain, "gate", "out", n_tokens, attn)

        n_tokens = len(gate)
        self.chains.get("gate", (attn,), n_tokens, make).run(gate=gate, out=out)
        return out

    def _store(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
        gate: Floats | None,
    ) -> Floats:
        """q [tokens, heads, channels], normed and rotated; K and V are in their pages, and the
        gate in its place, afterwards."""
        n_tokens, attn = x.shape[0], spec.attention
        x = np.ascontiguousarray(x)
        stores = attn.kv_from is None
        fused_store = stores and is_stored_at_once(cache)
        pairs = 0 if inputs.rope is None else inputs.rope.cos.shape[-1]
        chain = self.chains.get(
            "qkv",
            (layer, spec, cache),
            n_tokens,
            lambda chain: self.add_projections(
                chain, n_tokens, layer, attn, inputs, cache if fused_store else None
            ),
            pairs,
        )
        q = np.empty((n_tokens, attn.n_heads, attn.key_dim), np.float32)
        values: dict[str, int | NDArray[Any]] = {"x": x, "q": q}
        if gate is not None:
            values["gate"] = gate
        if stores:
            k = np.empty((n_tokens, attn.n_kv_heads, attn.key_dim), np.float32)
            v = np.empty((n_tokens, attn.n_kv_heads, attn.value_dim), np.float32)
            values |= {"k": k, "v": v}
        if inputs.rope is not None:
            values |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
        if fused_store:
            values |= self.stored.of(cache, segments, n_tokens)
        chain.run(**values)
        if stores and not fused_store:
            store_rotated(store_kv_cpu, rotate_cpu, k, v, cache, segments)
            pack_groups(store_groups_cpu, cache, segments)
        if inputs.q_scale is not None:
            q *= inputs.q_scale[:, None, None]
        return q

    def add_projections(
        self,
        chain: Chain,
        n_tokens: int,
        layer: LayerWeights,
        attn: AttentionSpec,
        inputs: TokenInputs,
        cache: LayerCache | None,
    ) -> None:
        """From "x" to "q", "k", "v" and "gate", and to a cache if there is one, by these names of
        the chain."""
        weights = layer.attention
        h = self.chains.add_norm(chain, n_tokens, layer.attn_norm)
        q_bytes = 4 * n_tokens * attn.n_heads * attn.key_dim
        both = chain.take(2 * q_bytes) if attn.gated else None
        products = [with_bias(weights.attn_q, both or "q")]
        products += [
            with_bias(linear, name)
            for name, linear in (
                ("k", weights.attn_k),
                ("v", weights.attn_v),
                ("gate", weights.attn_gate),
            )
            if linear is not None
        ]
        add_products(chain, h, n_tokens, products)
        if attn.clamp:
            for name, linear in (
                (both or "q", weights.attn_q),
                ("k", weights.attn_k),
                ("v", weights.attn_v),
            ):
                if linear is not None:
                    self._add_clamp(chain, name, n_tokens * linear.weight.shape[0], attn.clamp)
        if both is not None:
            where = Memory(both, 2 * q_bytes), Memory("q", q_bytes), Memory("gate", q_bytes)
            job = SplitJob(0, n_tokens, attn.n_heads, attn.key_dim, *where)
            chain.add(specialized(RESIDUALS)["split"], job, min(n_threads(), n_tokens))
        q_heads = attn.n_heads, attn.key_dim
        self._add_turn(chain, "q", n_tokens, q_heads, weights.attn_q_norm, attn, inputs)
        if attn.kv_from is not None:
            return
        self._add_value(chain, n_tokens, weights, attn)
        k_heads = attn.n_kv_heads, attn.key_dim
        self._add_turn(chain, "k", n_tokens, k_heads, weights.attn_k_norm, attn, inputs)
        if cache is not None:
            add_store(chain, "k", "v", n_tokens, cache)

    def _add_clamp(self, chain: Chain, x: Where, n: int, limit: float) -> None:
        """See `AttentionSpec.clamp`."""
        job = ClampJob(0, n, Memory(x, 4 * n), self.chains.floats(limit))
        chain.add(specialized(RESIDUALS)["clamp"], job, n_threads())

    def _add_value(
        self, chain: Chain, n_tokens: int, weights: AttentionWeights, attn: AttentionSpec
    ) -> None:
        """V's norm, from K as it was projected where there is no `attn_v`."""
        if attn.value_from_key:
            assert weights.v_norm is not None
            self.chains.add_norm(chain, n_tokens * attn.n_kv_heads, weights.v_norm, "k", "v")
        elif weights.v_norm is not None:
            self.chains.add_norm(chain, n_tokens * attn.n_kv_heads, weights.v_norm, "v", "v")

    def _add_turn(
        self,
        chain: Chain,
        name: str,
        n_tokens: int,
        heads: tuple[int, int],
        norm: Norm | None,
        attn: AttentionSpec,
        inputs: TokenInputs,
    ) -> None:
        """The norm of q or k, and RoPE, where there are such."""
        n_heads, size = heads
        if norm is not None and norm.spec.span == "row":
            if attn.norms_after_rope:
                raise BoundsError("rows are not normed after RoPE here")
            self.chains.add_norm(chain, n_tokens, norm, name, name)
            norm = None
        if norm is None and inputs.rope is None:
            return
        job = RopeJob(0, n_tokens, n_heads, size, Memory(name, 4 * n_tokens * n_heads * size))
        if norm is not None:
            each = norm.spec.span == "heads"
            job = job._replace(
                weight=Memory(norm.weight, 4 * size * (n_heads if each else 1)),
                eps=self.chains.floats(norm.spec.eps),
                weight_stride=4 * size if each else 0,
                centred=int(norm.spec.kind == "layer"),
                norm_last=int(attn.norms_after_rope),
            )
        if inputs.rope is not None:
            pairs = inputs.rope.cos.shape[-1]
            if 2 * pairs > size:
                raise BoundsError(f"RoPE turns {pairs} pairs of {size} channels")
            job = job._replace(
                n_pairs=pairs,
                neighbours=int(inputs.rope.interleaved),
                cos=Memory("cos", 4 * n_tokens * pairs),
                sin=Memory("sin", 4 * n_tokens * pairs),
            )
        chain.add(activation_worker("rope"), job, min(n_threads(), n_tokens))


class EncoderLayer:
    """A mixer of attention to both sides, one of `Backend.mixers`.

    Args:
        composed: for layers whose matrices have no kernel.
        attention: has the chain of projections.
    """

    def __init__(self, composed: Mix, attention: AttentionLayer) -> None:
        self.composed = composed
        self.attention = attention

    def __call__(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Floats:
        assert isinstance(spec.mixer, EncoderAttentionSpec)
        attn, n_tokens = spec.mixer.attention, len(x)
        if not self.attention.is_fused(layer, attn):
            return np.asarray(self.composed(x, layer, spec, inputs, cache, batch))
        pairs = 0 if inputs.rope is None else inputs.rope.cos.shape[-1]
        chain = self.attention.chains.get(
            "encoder",
            (layer, spec),
            n_tokens,
            lambda chain: self.attention.add_projections(
                chain, n_tokens, layer, attn, inputs, None
            ),
            pairs,
        )
        q = np.empty((n_tokens, attn.n_heads, attn.key_dim), np.float32)
        k = np.empty((n_tokens, attn.n_kv_heads, attn.key_dim), np.float32)
        v = np.empty((n_tokens, attn.n_kv_heads, attn.value_dim), np.float32)
        values = {"x": np.ascontiguousarray(x), "q": q, "k": k, "v": v}
        if inputs.rope is not None:
            values |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
        chain.run(**values)
        return np.asarray(attend_texts(q, k, v, batch.starts, spec.mixer).reshape(n_tokens, -1))
