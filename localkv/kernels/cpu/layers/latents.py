"""Latent attention on the CPU: a chain up to queries and stored rows, and one after attention.

`kernels/attention_mixers.py` has the formulas.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import LatentAttentionSpec, LayerSpec
from localkv.cache.arrays import Batch, LayerCache
from localkv.kernels.attention import Merge, pack_groups, store_rotated
from localkv.kernels.attention_mixers import SegmentLatents, attend
from localkv.kernels.backend import Mix, TokenInputs
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layers.attention import StoredRows, is_stored_at_once
from localkv.kernels.cpu.layers.chains import RESIDUALS, LayerChains, runs
from localkv.kernels.cpu.linear.jobs import AttentionGateJob, LatentQueriesJob, LatentRowsJob
from localkv.kernels.cpu.linear.matrices import has_kernel
from localkv.kernels.cpu.linear.products import HeadRows, add_head_products, add_products, with_bias
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Place
from localkv.kernels.cpu.store.store_kv import add_store, rotate_cpu, store_groups_cpu, store_kv_cpu
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights, Linear
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd import LANES
from localkv.system.threads import n_threads

LATENT_STEPS = KernelSource("linear/latent_steps")


def is_fused(layer: LayerWeights) -> bool:
    """Whether chains can run a layer's latent attention."""
    weights = layer.mixer
    assert isinstance(weights, LatentAttentionWeights)
    linears = [weights.attn_q, weights.attn_kv_a_mqa]
    if weights.attn_q_a is not None:
        linears.append(weights.attn_q_a)
    if weights.attn_gate is not None:
        linears.append(weights.attn_gate)
    stacks = weights.attn_k_b, weights.attn_v_b
    return (
        runs(*linears)
        and all(has_kernel(stack) and not stack.halves_activations for stack in stacks)
        and weights.attn_kv_a_norm.spec.kind == "rms"
        and (weights.attn_gate is None or weights.attn_v_b.shape[1] % LANES == 0)
    )


class LatentLayer:
    """A mixer of latent attention, one of `Backend.mixers`.

    Args:
        composed: for layers whose matrices have no kernel.
        latents: attention over packed latents.
        merge: what it summed in several segments.
    """

    def __init__(
        self, chains: LayerChains, composed: Mix, latents: SegmentLatents, merge: Merge
    ) -> None:
        self.chains = chains
        self.composed = composed
        self.latents = latents
        self.merge = merge
        self.stored = StoredRows()

    def __call__(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Floats:
        attn, weights, n_tokens = spec.mixer, layer.mixer, len(x)
        assert isinstance(attn, LatentAttentionSpec)
        assert isinstance(weights, LatentAttentionWeights)
        if not is_fused(layer):
            return np.asarray(self.composed(x, layer, spec, inputs, cache, batch))
        absorbed, rotated, gate = self._queries(x, layer, spec, attn, inputs, cache, batch)
        out = attend(
            self.latents,
            absorbed,
            rotated,
            cache,
            batch,
            attn.params,
            rotate=rotate_cpu,
            merge=self.merge,
        )

        def make(chain: Chain) -> None:
            self.add_values(chain, n_tokens, weights.attn_v_b, attn)

        values = np.empty((n_tokens, attn.width), np.float32)
        chain = self.chains.get("values", (weights.attn_v_b, attn), n_tokens, make)
        chain.run(sums=np.ascontiguousarray(out), out=values, **gate)
        return values

    def _queries(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        attn: LatentAttentionSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> tuple[Floats, Floats, dict[str, Floats]]:
        """q' [tokens, n_heads, latent_dim] and its rotated part; rows are in the cache; and, by its
        name, the gate, if there is one."""
        n_tokens, segments = len(x), cache.rows_of(batch)
        at_once = is_stored_at_once(cache)
        pairs = 0 if inputs.rope is None else inputs.rope.cos.shape[-1]
        chain = self.chains.get(
            "latents",
            (layer, spec, cache),
            n_tokens,
            lambda chain: self.add_queries(
                chain, n_tokens, layer, attn, inputs, cache if at_once else None
            ),
            pairs,
            inputs.q_scale is not None,
        )
        shape = n_tokens, attn.n_heads
        absorbed = np.empty((*shape, attn.latent_dim), np.float32)
        rotated = np.empty((*shape, attn.rope_dim), np.float32)
        latent = np.empty((n_tokens, 1, attn.latent_dim), np.float32)
        key = np.empty((n_tokens, 1, attn.rope_dim), np.float32)
        values: dict[str, int | NDArray[Any]] = {"x": np.ascontiguousarray(x)}
        values |= {"absorbed": absorbed, "rotated": rotated, "latent": latent, "key": key}
        gate = {"gate": np.empty(shape, np.float32)} if attn.head_gated else {}
        values |= gate
        if inputs.rope is not None:
            values |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
        if inputs.q_scale is not None:
            values["q_scale"] = np.ascontiguousarray(inputs.q_scale, np.float32)
        if at_once:
            values |= self.stored.of(cache, segments, n_tokens)
        chain.run(**values)
        if not at_once:
            store_rotated(store_kv_cpu, rotate_cpu, latent, key, cache, segments)
            pack_groups(store_groups_cpu, cache, segments)
        return absorbed, rotated, gate

    def add_queries(
        self,
        chain: Chain,
        n_tokens: int,
        layer: LayerWeights,
        attn: LatentAttentionSpec,
        inputs: TokenInputs,
        cache: LayerCache | None,
    ) -> None:
        """From "x" to "absorbed" and "rotated" queries, and to "latent" and "key" and, if there are
        such, "gate" and a cache, by these names of the chain."""
        weights = layer.mixer
        assert isinstance(weights, LatentAttentionWeights)
        h = self.chains.add_norm(chain, n_tokens, layer.attn_norm)
        width = attn.latent_dim + attn.rope_dim
        first = weights.attn_q if weights.attn_q_a is None else weights.attn_q_a
        q, row = self._place(chain, n_tokens, first), chain.take(4 * n_tokens * width)
        products = [with_bias(first, q), with_bias(weights.attn_kv_a_mqa, row)]
        if weights.attn_gate is not None:
            products.append(with_bias(weights.attn_gate, "gate"))
        add_products(chain, h, n_tokens, products)
        if weights.attn_q_a is not None:
            low = self.chains.add_norm(chain, n_tokens, weights.attn_q_a_norm, q)
            q = self._place(chain, n_tokens, weights.attn_q)
            add_products(chain, low, n_tokens, [with_bias(weights.attn_q, q)])
        norm = weights.attn_kv_a_norm
        rows = LatentRowsJob(
            next_row=0,
            n_rows=n_tokens,
            latent_dim=attn.latent_dim,
            rope_dim=attn.rope_dim,
            x=Memory(row, 4 * n_tokens * width),
            weight=Memory(norm.weight, 4 * attn.latent_dim),
            eps=self.chains.floats(norm.spec.eps),
            latent=Memory("latent", 4 * n_tokens * attn.latent_dim),
            rotated=Memory("key", 4 * n_tokens * attn.rope_dim),
            **_turns(n_tokens, attn, inputs),
        )
        workers, threads = specialized(LATENT_STEPS), min(n_threads(), n_tokens)
        chain.add(workers["latent_rows"], rows, threads)
        head = attn.nope_dim + attn.rope_dim
        n_rows = n_tokens * attn.n_heads
        queries = LatentQueriesJob(
            next_row=0,
            n_rows=n_tokens,
            n_heads=attn.n_heads,
            nope_dim=attn.nope_dim,
            rope_dim=attn.rope_dim,
            x=Memory(q, 4 * n_rows * head),
            rotated=Memory("rotated", 4 * n_rows * attn.rope_dim),
            scale=0 if inputs.q_scale is None else Memory("q_scale", 4 * n_tokens),
            **_turns(n_tokens, attn, inputs),
        )
        chain.add(workers["latent_queries"], queries, threads)
        if cache is not None:
            add_store(chain, "latent", "key", n_tokens, cache)
        plain = HeadRows(q, head, attn.n_heads * head)
        absorbed = HeadRows("absorbed", attn.latent_dim, attn.n_heads * attn.latent_dim)
        add_head_products(chain, plain, n_tokens, weights.attn_k_b, absorbed)

    def add_values(
        self, chain: Chain, n_tokens: int, stack: PackedTensor, attn: LatentAttentionSpec
    ) -> None:
        """From "sums" of latents to "out", times the sigmoid of "gate" if heads have one, by these
        names of the chain."""
        sums = HeadRows("sums", attn.latent_dim, attn.n_heads * attn.latent_dim)
        out = HeadRows("out", attn.value_dim, attn.n_heads * attn.value_dim)
        add_head_products(chain, sums, n_tokens, stack, out)
        if attn.head_gated:
            rows = 4 * n_tokens * attn.n_heads
            job = AttentionGateJob(
                next_row=0,
                n_rows=n_tokens,
                n_heads=attn.n_heads,
                head_dim=attn.value_dim,
                x=Memory("out", rows * attn.value_dim),
                gate=Memory("gate", rows),
                is_by_head=1,
                is_softplus=0,
            )
            worker = specialized(RESIDUALS)["gates"]
            chain.add(worker, job, min(n_threads(), n_tokens))

    def _place(self, chain: Chain, n_tokens: int, linear: Linear) -> Place:
        return chain.take(4 * n_tokens * linear.weight.shape[0])


def _turns(n_tokens: int, attn: LatentAttentionSpec, inputs: TokenInputs) -> dict[str, Item]:
    """How rotated parts are turned."""
    if inputs.rope is None:
        return {}
    pairs = inputs.rope.cos.shape[-1]
    if 2 * pairs > attn.rope_dim:
        raise BoundsError(f"RoPE turns {pairs} pairs of {attn.rope_dim} channels")
    return {
        "n_pairs": pairs,
        "neighbours": int(inputs.rope.interleaved),
        "cos": Memory("cos", 4 * n_tokens * pairs),
        "sin": Memory("sin", 4 * n_tokens * pairs),
    }
