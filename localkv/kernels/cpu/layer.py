"""The operations of a layer on the CPU, each one chain of compiled workers.

A chain is kept for each layer and operation, as decoding runs the same ones again and again. What
has no kernel (formats that are decoded by tile, experts) is left to the composed operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.ffn_spec import Ffn, MlpSpec
from localkv.arch.mixer_spec import AttentionSpec
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.cache.kv_cache import Batch, LayerCache, SegmentBatch
from localkv.kernels.attention import SegmentAttention, attention
from localkv.kernels.backend import Backend, FeedForward, TokenInputs, capped_logits
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.linear.activation_job import GateJob, RopeJob
from localkv.kernels.cpu.linear.matrices import has_kernel
from localkv.kernels.cpu.linear.products import Product, add_products, with_bias
from localkv.kernels.cpu.row_operations import GATED, activation_worker, norm_step
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Place, Scratch
from localkv.kernels.cpu.store.rotate import rotate_cpu
from localkv.kernels.cpu.store.store_kv import add_store, has_encoders, store_kv_cpu, stored_rows
from localkv.kernels.layer_weights import LayerWeights, Linear, MlpWeights, Norm
from localkv.kernels.store_kv import store_rotated
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads

MANY_CHAINS = 4096
"""The most that are remembered."""


def _runs(*layers: Linear) -> bool:
    return all(has_kernel(layer.weight) and not layer.weight.halves_activations for layer in layers)


def _has_chain(layer: LayerWeights, spec: AttentionSpec) -> bool:
    """Whether norm, q, k, v, RoPE and the store of a layer are one chain."""
    weights = layer.attention
    k, v = weights.attn_k, weights.attn_v
    if layer.attn_norm is None or k is None or v is None:
        return False
    norms = (spec.q_norm, spec.k_norm)
    plain_norms = all(n is None or (n.kind == "rms" and n.span == "head") for n in norms)
    return (
        plain_norms
        and not (spec.gated or spec.norms_after_rope or spec.v_norm)
        and _runs(weights.attn_q, k, v)
    )


def _adds(spec: LayerSpec, *layers: Linear) -> bool:
    """Whether the last of these products can add to x as it goes."""
    return spec.residual_scale == 1.0 and _runs(*layers)


@dataclass(frozen=True)
class _Kept:
    """A chain, and the objects it was made for, which it keeps alive."""

    made_for: tuple[object, ...]
    facts: tuple[int, ...]
    chain: Chain


_StoredRows = tuple[tuple[SegmentBatch, ...], list[int], dict[str, int | NDArray[Any]]]
"""Of a batch, and the pages that its segments have."""


class CpuLayer:
    """Fused operations, in place of those of `composed`.

    Args:
        scratch: shared with the products; one thread uses it at a time.
        attention: over packed K and V.
    """

    def __init__(self, composed: Backend, scratch: Scratch, attention: SegmentAttention) -> None:
        self.attention = attention
        self.composed = composed
        self.fused_ffns: dict[type[Ffn], FeedForward] = {MlpSpec: self.mlp_residual}
        self.scratch = scratch
        self.kept = dict[tuple[str, int], _Kept]()
        self.eps = dict[float, Floats]()
        self.stored: _StoredRows | None = None

    def _eps(self, value: float) -> Memory:
        """A float32."""
        if value not in self.eps:
            self.eps[value] = np.array([value], np.float32)
        return Memory(self.eps[value], 4)

    def _chain(
        self,
        name: str,
        made_for: tuple[object, ...],
        n_tokens: int,
        make: Callable[[Chain], None],
        *facts: int,
    ) -> Chain:
        """The chain of an operation on some weights, made anew if anything else has changed."""
        key = name, id(made_for[0])
        facts = (n_tokens, n_threads(), *facts)
        kept = self.kept.get(key)
        if (
            kept is None
            or kept.facts != facts
            or any(a is not b for a, b in zip(kept.made_for, made_for, strict=True))
        ):
            if len(self.kept) >= MANY_CHAINS:
                self.kept.clear()
            kept = _Kept(made_for, facts, Chain(self.scratch))
            make(kept.chain)
            self.kept[key] = kept
        return kept.chain

    def _stored_rows(
        self, cache: LayerCache, segments: tuple[SegmentBatch, ...], n_tokens: int
    ) -> dict[str, int | NDArray[Any]]:
        """`stored_rows`, which are looked at once for all layers whose caches are alike."""
        n_pages = [len(segment.k[0]) for segment in cache.segments]
        if self.stored is None or self.stored[0] is not segments or self.stored[1] != n_pages:
            self.stored = segments, n_pages, stored_rows(cache, segments, n_tokens)
        return self.stored[2]

    def _add_norm(self, chain: Chain, n_tokens: int, norm: Norm) -> Place:
        """A norm of the rows that are named "x"."""
        out = chain.take(4 * n_tokens * norm.weight.shape[0])
        worker, job = norm_step(norm, "x", self._eps(norm.spec.eps).where, out, n_tokens)
        chain.add(activation_worker(worker), job, min(n_threads(), n_tokens))
        return out

    def grouped_attention(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Floats:
        weights, attn = layer.attention, spec.attention
        if not _has_chain(layer, attn):
            composed = self.composed.mixers[AttentionSpec]
            return np.asarray(composed(x, layer, spec, inputs, cache, batch))
        q = self._norm_qkv_rope_store(x, layer, spec, inputs, cache, cache.rows_of(batch))
        out: Floats = attention(
            self.attention, q, cache, batch, attn.params, weights.sinks, rotate=rotate_cpu
        )
        return out.reshape(len(out), -1)

    def _norm_qkv_rope_store(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
    ) -> Floats:
        """q, normed and rotated; K and V are in their pages afterwards."""
        n_tokens, attn = x.shape[0], spec.attention
        x = np.ascontiguousarray(x)
        scaled = any(s.scale_k is not None or s.scale_v is not None for s in cache.segments)
        fused_store = has_encoders(cache) and not scaled
        pairs = 0 if inputs.rope is None else inputs.rope.cos.shape[-1]
        chain = self._chain(
            "qkv",
            (layer, spec, cache),
            n_tokens,
            lambda chain: self._add_qkv(
                chain, n_tokens, layer, spec, inputs, cache if fused_store else None
            ),
            pairs,
        )
        q = np.empty((n_tokens, attn.n_heads, attn.key_dim), np.float32)
        k = np.empty((n_tokens, attn.n_kv_heads, attn.key_dim), np.float32)
        v = np.empty((n_tokens, attn.n_kv_heads, attn.value_dim), np.float32)
        values: dict[str, int | NDArray[Any]] = {"x": x, "q": q, "k": k, "v": v}
        if inputs.rope is not None:
            values |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
        if fused_store:
            values |= self._stored_rows(cache, segments, n_tokens)
        chain.run(**values)
        if not fused_store:
            store_rotated(store_kv_cpu, rotate_cpu, k, v, cache, segments)
        if inputs.q_scale is not None:
            q *= inputs.q_scale[:, None, None]
        return q

    def _add_qkv(
        self,
        chain: Chain,
        n_tokens: int,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache | None,
    ) -> None:
        weights, attn = layer.attention, spec.attention
        assert layer.attn_norm is not None
        assert weights.attn_k is not None
        assert weights.attn_v is not None
        h = self._add_norm(chain, n_tokens, layer.attn_norm)
        layers = {"q": weights.attn_q, "k": weights.attn_k, "v": weights.attn_v}
        products = [with_bias(linear, name) for name, linear in layers.items()]
        add_products(chain, h, n_tokens, products)
        self._add_turn(
            chain, "q", n_tokens, attn.n_heads, attn.key_dim, weights.attn_q_norm, inputs
        )
        self._add_turn(
            chain, "k", n_tokens, attn.n_kv_heads, attn.key_dim, weights.attn_k_norm, inputs
        )
        if cache is not None:
            add_store(chain, "k", "v", n_tokens, cache)

    def _add_turn(
        self,
        chain: Chain,
        name: str,
        n_tokens: int,
        n_heads: int,
        size: int,
        norm: Norm | None,
        inputs: TokenInputs,
    ) -> None:
        """RMSNorm of each head of q or k, and RoPE, where there are such."""
        if norm is None and inputs.rope is None:
            return
        if norm is not None and norm.spec.kind != "rms":
            raise BoundsError(f"heads have no {norm.spec.kind} norm here")
        job = RopeJob(0, n_tokens, n_heads, size, Memory(name, 4 * n_tokens * n_heads * size))
        if norm is not None:
            job = job._replace(weight=Memory(norm.weight, 4 * size), eps=self._eps(norm.spec.eps))
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

    def out_residual(self, x: Floats, attn: Floats, layer: LayerWeights, spec: LayerSpec) -> Floats:
        assert layer.mixer is not None
        n_tokens, attn_output = x.shape[0], layer.mixer.output
        if layer.post_attn_norm is not None or not _adds(spec, attn_output):
            return self.composed.out_residual(x, attn, layer, spec)
        x = x if attn_output.bias is None else x + attn_output.bias
        x, attn = np.ascontiguousarray(x), np.ascontiguousarray(attn)

        def make(chain: Chain) -> None:
            product = Product(attn_output.weight, "out", "x", 4 * x.shape[1])
            add_products(chain, "attn", n_tokens, [product])

        chain = self._chain("out", (attn_output,), n_tokens, make)
        out = np.empty_like(x)
        chain.run(x=x, attn=attn, out=out)
        return out

    def mlp_residual(
        self, x: Floats, layer_input: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        mlp, ffn, norm = layer.ffn, spec.ffn, layer.ffn_norm
        assert isinstance(mlp, MlpWeights)
        assert isinstance(ffn, MlpSpec)
        gate_layer = mlp.ffn_gate
        if (
            norm is None
            or gate_layer is None
            or ffn.sparsity
            or ffn.activation not in GATED
            or layer.post_ffn_norm is not None
            or not _adds(spec, gate_layer, mlp.ffn_up, mlp.ffn_down)
        ):
            composed = self.composed.ffns[MlpSpec]
            return np.asarray(composed(x, layer_input, layer, spec))
        source = layer_input if spec.parallel else x
        n_tokens, n_ff = x.shape[0], ffn.n_ff
        x, source = np.ascontiguousarray(x), np.ascontiguousarray(source)
        residual = x if mlp.ffn_down.bias is None else x + mlp.ffn_down.bias

        def make(chain: Chain) -> None:
            h = self._add_norm(chain, n_tokens, norm)
            if n_ff % LANES:
                raise BoundsError(f"{n_ff} values are no multiple of {LANES}")
            n_bytes = 4 * n_tokens * n_ff
            gate, up = (chain.take(n_bytes) for _ in range(2))
            products = [with_bias(gate_layer, gate), with_bias(mlp.ffn_up, up)]
            add_products(chain, h, n_tokens, products)
            job = GateJob(0, n_tokens * n_ff, Memory(gate, n_bytes), Memory(up, n_bytes))
            chain.add(activation_worker(GATED[ffn.activation]), job, n_threads())
            product = Product(mlp.ffn_down.weight, "out", "residual", 4 * x.shape[1])
            add_products(chain, gate, n_tokens, [product])

        chain = self._chain("mlp", (layer, spec), n_tokens, make)
        out = np.empty_like(x)
        chain.run(x=source, residual=residual, out=out)
        return out

    def logits(self, x: Floats, output_norm: Norm, output: Linear, spec: ModelSpec) -> Floats:
        n_tokens = x.shape[0]
        if not _runs(output):
            return self.composed.logits(x, output_norm, output, spec)
        x = np.ascontiguousarray(x)

        def make(chain: Chain) -> None:
            h = self._add_norm(chain, n_tokens, output_norm)
            add_products(chain, h, n_tokens, [with_bias(output, "out")])

        chain = self._chain("logits", (output, output_norm), n_tokens, make)
        out = np.empty((n_tokens, output.weight.shape[0]), np.float32)
        chain.run(x=x, out=out)
        return capped_logits(out, spec)

    def forget(self) -> None:
        """Make all chains anew."""
        self.kept.clear()

    def operations(self) -> dict[str, Any]:
        """For `dataclasses.replace` of the composed backend."""
        return {
            "mixers": {**self.composed.mixers, AttentionSpec: self.grouped_attention},
            "out_residual": self.out_residual,
            "ffns": {**self.composed.ffns, **self.fused_ffns},
            "logits": self.logits,
        }
