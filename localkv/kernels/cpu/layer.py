"""The operations of a layer on the CPU, each one chain of compiled workers.

A chain is kept for each layer and operation, as decoding runs the same ones again and again. What
has no kernel (formats that are decoded by tile, experts) is left to the composed operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localkv.cache.kv_cache import LayerCache, SegmentBatch
from localkv.config import ModelConfig
from localkv.kernels.backend import Backend, TokenInputs
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.attention.kernels import n_threads
from localkv.kernels.cpu.linear.matrices import has_kernel
from localkv.kernels.cpu.linear.products import Product, add_products, with_bias
from localkv.kernels.cpu.row_operations import activation_worker
from localkv.kernels.cpu.runtime.chain import Chain, Item, Memory, Place, Scratch
from localkv.kernels.cpu.store.store_kv import add_store, has_encoders, store_kv_cpu, stored_rows
from localkv.kernels.layer_weights import AttentionWeights, Linear, MlpWeights
from localkv.kernels.store_kv import store_rotated
from localkv.simd.vector import LANES

MANY_CHAINS = 4096
"""So many are remembered."""


def _runs(*layers: Linear) -> bool:
    return all(has_kernel(layer.weight) and not layer.weight.halves_activations for layer in layers)


@dataclass(frozen=True)
class _Kept:
    """A chain, and the objects it was made for, which it keeps alive."""

    made_for: tuple[object, ...]
    facts: tuple[int, ...]
    chain: Chain


_StoredRows = tuple[tuple[SegmentBatch, ...], list[int], dict[str, int | Tensor]]
"""Of a batch, and the pages that its segments have."""


class CpuLayer:
    """Fused operations, in place of those of `composed`.

    Args:
        scratch: shared with the products; one thread uses it at a time.
    """

    def __init__(self, composed: Backend, scratch: Scratch) -> None:
        self.composed = composed
        self.scratch = scratch
        self.kept = dict[tuple[str, int], _Kept]()
        self.eps = dict[float, Tensor]()
        self.stored: _StoredRows | None = None

    def _eps(self, value: float) -> Memory:
        """A float32."""
        if value not in self.eps:
            self.eps[value] = torch.tensor([value], dtype=torch.float32)
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
        facts = (n_tokens, torch.get_num_threads(), *facts)
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
    ) -> dict[str, int | Tensor]:
        """`stored_rows`, which are looked at once for all layers whose caches are alike."""
        n_pages = [len(segment.k[0]) for segment in cache.segments]
        if self.stored is None or self.stored[0] is not segments or self.stored[1] != n_pages:
            self.stored = segments, n_pages, stored_rows(cache, segments, n_tokens)
        return self.stored[2]

    def _add_norm(self, chain: Chain, n_tokens: int, weight: Tensor, eps: float) -> Place:
        """RMSNorm of the rows that are named "x"."""
        n = weight.shape[0]
        n_bytes = 4 * n_tokens * n
        out = chain.take(n_bytes)
        job: list[Item] = [0, n_tokens, n, Memory("x", n_bytes), Memory(weight, 4 * n)]
        job += (self._eps(eps), Memory(out, n_bytes))
        chain.add(activation_worker("norm"), job, min(n_threads(), n_tokens))
        return out

    def norm_qkv_rope_store(
        self,
        x: Tensor,
        weights: AttentionWeights,
        config: ModelConfig,
        inputs: TokenInputs,
        cache: LayerCache,
        segments: tuple[SegmentBatch, ...],
    ) -> Tensor:
        n_tokens = x.shape[0]
        if not _runs(weights.attn_q, weights.attn_k, weights.attn_v):
            return self.composed.norm_qkv_rope_store(x, weights, config, inputs, cache, segments)
        x = x.contiguous()
        scaled = any(s.scale_k is not None or s.scale_v is not None for s in cache.segments)
        fused_store = has_encoders(cache) and not scaled
        pairs = 0 if inputs.rope is None else inputs.rope.cos.shape[-1]
        chain = self._chain(
            "qkv",
            (weights, config, cache),
            n_tokens,
            lambda chain: self._add_qkv(
                chain, n_tokens, weights, config, inputs, cache if fused_store else None
            ),
            pairs,
        )
        q = torch.empty(n_tokens, config.n_heads, config.head_dim)
        k = torch.empty(n_tokens, config.n_kv_heads, config.head_dim)
        v = torch.empty_like(k)
        values: dict[str, int | Tensor] = {"x": x, "q": q, "k": k, "v": v}
        if inputs.rope is not None:
            values |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
        if fused_store:
            values |= self._stored_rows(cache, segments, n_tokens)
        chain.run(**values)
        if not fused_store:
            store_rotated(store_kv_cpu, k, v, cache, segments)
        return q if inputs.q_scale is None else q.mul_(inputs.q_scale[:, None, None])

    def _add_qkv(
        self,
        chain: Chain,
        n_tokens: int,
        weights: AttentionWeights,
        config: ModelConfig,
        inputs: TokenInputs,
        cache: LayerCache | None,
    ) -> None:
        h = self._add_norm(chain, n_tokens, weights.attn_norm, config.rms_eps)
        layers = {"q": weights.attn_q, "k": weights.attn_k, "v": weights.attn_v}
        products = [with_bias(layer, name) for name, layer in layers.items()]
        add_products(chain, h, n_tokens, products)
        sides: tuple[tuple[str, int, Tensor | None], ...] = (
            ("q", config.n_heads, weights.attn_q_norm),
            ("k", config.n_kv_heads, weights.attn_k_norm),
        )
        for name, n_heads, norm in sides:
            if norm is None and inputs.rope is None:
                continue
            size = config.head_dim
            job: list[Item] = [
                0,
                n_tokens,
                n_heads,
                size,
                Memory(name, 4 * n_tokens * n_heads * size),
            ]
            job += (0 if norm is None else Memory(norm, 4 * size), self._eps(config.rms_eps))
            if inputs.rope is None:
                job += (0, 0, 0, 0)
            else:
                pairs = inputs.rope.cos.shape[-1]
                if 2 * pairs > size:
                    raise BoundsError(f"RoPE turns {pairs} pairs of {size} channels")
                job += (pairs, int(inputs.rope.interleaved))
                job += (Memory(turn, 4 * n_tokens * pairs) for turn in ("cos", "sin"))
            chain.add(activation_worker("rope"), job, min(n_threads(), n_tokens))
        if cache is not None:
            add_store(chain, "k", "v", n_tokens, cache)

    def out_residual(self, x: Tensor, attn: Tensor, attn_output: Linear) -> Tensor:
        n_tokens = x.shape[0]
        if not _runs(attn_output):
            return self.composed.out_residual(x, attn, attn_output)
        x = x if attn_output.bias is None else x + attn_output.bias
        x, attn = x.contiguous(), attn.contiguous()

        def make(chain: Chain) -> None:
            product = Product(attn_output.weight, "out", "x", 4 * x.shape[1])
            add_products(chain, "attn", n_tokens, [product])

        chain = self._chain("out", (attn_output,), n_tokens, make)
        out = torch.empty_like(x)
        chain.run(x=x, attn=attn, out=out)
        return out

    def mlp_residual(self, x: Tensor, ffn_norm: Tensor, mlp: MlpWeights, eps: float) -> Tensor:
        n_tokens, n_ff = x.shape[0], mlp.ffn_gate.weight.shape[0]
        if not _runs(mlp.ffn_gate, mlp.ffn_up, mlp.ffn_down):
            return self.composed.mlp_residual(x, ffn_norm, mlp, eps)
        x = x.contiguous()
        residual = x if mlp.ffn_down.bias is None else x + mlp.ffn_down.bias

        def make(chain: Chain) -> None:
            h = self._add_norm(chain, n_tokens, ffn_norm, eps)
            if n_ff % LANES:
                raise BoundsError(f"{n_ff} values are no multiple of {LANES}")
            n_bytes = 4 * n_tokens * n_ff
            gate, up = (chain.take(n_bytes) for _ in range(2))
            products = [with_bias(mlp.ffn_gate, gate), with_bias(mlp.ffn_up, up)]
            add_products(chain, h, n_tokens, products)
            job = (0, n_tokens * n_ff, Memory(gate, n_bytes), Memory(up, n_bytes))
            chain.add(activation_worker("swiglu"), job, n_threads())
            product = Product(mlp.ffn_down.weight, "out", "residual", 4 * x.shape[1])
            add_products(chain, gate, n_tokens, [product])

        chain = self._chain("mlp", (mlp, ffn_norm), n_tokens, make)
        out = torch.empty_like(x)
        chain.run(x=x, residual=residual, out=out)
        return out

    def logits(self, x: Tensor, output_norm: Tensor, output: Linear, eps: float) -> Tensor:
        n_tokens = x.shape[0]
        if not _runs(output):
            return self.composed.logits(x, output_norm, output, eps)
        x = x.contiguous()

        def make(chain: Chain) -> None:
            h = self._add_norm(chain, n_tokens, output_norm, eps)
            add_products(chain, h, n_tokens, [with_bias(output, "out")])

        chain = self._chain("logits", (output, output_norm), n_tokens, make)
        out = torch.empty(n_tokens, output.weight.shape[0])
        chain.run(x=x, out=out)
        return out

    def forget(self) -> None:
        """Make all chains anew."""
        self.kept.clear()

    def operations(self) -> dict[str, Any]:
        """For `dataclasses.replace` of the composed backend."""
        return {
            "norm_qkv_rope_store": self.norm_qkv_rope_store,
            "out_residual": self.out_residual,
            "mlp_residual": self.mlp_residual,
            "logits": self.logits,
        }
