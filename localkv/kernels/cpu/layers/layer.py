"""The operations of a layer on the CPU, each one chain of compiled workers.

What no chain can run (rows that are no whole vectors) is left to the composed operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    EncoderAttentionSpec,
    Ffn,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    MlpAndMoeSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
)
from localkv.kernels.attention import SegmentAttention
from localkv.kernels.attention_mixers import SegmentLatents
from localkv.kernels.backend import Backend, FeedForward, Mix, capped_logits
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.layers.attention import AttentionLayer, EncoderLayer
from localkv.kernels.cpu.layers.chains import LayerChains, adds_at_once, runs
from localkv.kernels.cpu.layers.latents import LatentLayer
from localkv.kernels.cpu.layers.recurrent import RecurrentLayer
from localkv.kernels.cpu.linear.products import CpuProducts, add_products, with_bias
from localkv.kernels.cpu.moe.experts import ExpertSteps, experts_run, mlp_runs
from localkv.kernels.cpu.runtime.chain import Chain, Scratch
from localkv.kernels.layer_weights import (
    LayerWeights,
    Linear,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
    Norm,
)
from localkv.simd import LANES


class ExpertLayer:
    """Both kinds of blocks with experts, in place of the ones of `composed`."""

    def __init__(self, chains: LayerChains, composed: Mapping[type[Ffn], FeedForward]) -> None:
        self.chains = chains
        self.composed = composed

    def __call__(
        self, x: Floats, layer_input: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        assert spec.ffn is not None
        if not self.has(layer):
            return np.asarray(self.composed[type(spec.ffn)](x, layer_input, layer, spec))
        given = {"x": layer_input if spec.parallel else x, "residual": x}
        if self.reads_input(spec):
            given["routed"] = layer_input
        n_tokens = x.shape[0]
        chain = self.chains.get(
            "moe", (layer, spec), n_tokens, lambda chain: self.add(chain, n_tokens, layer, spec)
        )
        out = np.empty(x.shape, np.float32)
        chain.run(**{key: np.ascontiguousarray(rows) for key, rows in given.items()}, out=out)
        return out

    def has(self, layer: LayerWeights) -> bool:
        """Whether a chain can run the block."""
        moe, ffn = layer.moe, layer.ffn
        dense = not isinstance(ffn, MlpAndMoeWeights) or mlp_runs(ffn.mlp)
        return moe is not None and experts_run(moe) and dense

    def reads_input(self, spec: LayerSpec) -> bool:
        """Whether the router reads the layer's input, which is "routed" to a chain."""
        return isinstance(spec.ffn, MoeSpec) and spec.ffn.router_reads_input

    def add(self, chain: Chain, n_tokens: int, layer: LayerWeights, spec: LayerSpec) -> None:
        """From "x" and "residual", and "routed", to "out", by these names of the chain."""
        assert layer.moe is not None
        n_embd = layer.moe.ffn_gate_inp.weight.shape[-1]
        steps = ExpertSteps(self.chains, chain, n_tokens, n_embd)
        if isinstance(spec.ffn, MlpAndMoeSpec):
            self._add_both(steps, layer, spec, spec.ffn)
            return
        weights, moe, post_norm = layer.ffn, spec.ffn, layer.post_ffn_norm
        assert isinstance(weights, MoeWeights)
        assert isinstance(moe, MoeSpec)
        h = self.chains.add_norm(chain, n_tokens, layer.ffn_norm)
        routed = "routed" if moe.router_reads_input else h
        if adds_at_once(post_norm, spec):
            steps.add_experts(h, routed, moe, weights, "out", "residual")
            return
        y = chain.take(4 * n_tokens * n_embd)
        steps.add_experts(h, routed, moe, weights, y)
        steps.add_normed(y, post_norm, "residual", "out", spec.residual_scale)

    def _add_both(
        self, steps: ExpertSteps, layer: LayerWeights, spec: LayerSpec, ffn: MlpAndMoeSpec
    ) -> None:
        """A dense block and experts side by side."""
        weights, chains, chain, n = layer.ffn, self.chains, steps.chain, steps.n_tokens
        assert isinstance(weights, MlpAndMoeWeights)
        n_bytes = 4 * n * steps.n_embd
        dense = steps.add_mlp(chains.add_norm(chain, n, layer.ffn_norm), ffn.mlp, weights.mlp)
        dense = chains.add_norm(chain, n, weights.post_mlp_norm, dense)
        routed = chains.add_norm(chain, n, weights.moe.router_norm)
        h = chains.add_norm(chain, n, weights.moe_norm)
        y, both = chain.take(n_bytes), chain.take(n_bytes)
        steps.add_experts(h, routed, ffn.moe, weights.moe, y)
        steps.add_normed(y, weights.post_moe_norm, dense, both)
        steps.add_normed(both, layer.post_ffn_norm, "residual", "out", spec.residual_scale)


def _before(x: Floats, last: Linear, post_norm: Norm | None, spec: LayerSpec) -> Floats:
    """What a block is added to; with its bias, if its last product adds to x as it goes."""
    if last.bias is not None and adds_at_once(post_norm, spec):
        x = x + last.bias
    return np.ascontiguousarray(x)


def _is_rms(norm: Norm | None) -> bool:
    return norm is None or norm.spec.kind == "rms"


def down_of(layer: LayerWeights) -> Linear:
    """The last matrix of a dense block."""
    assert isinstance(layer.ffn, MlpWeights)
    return layer.ffn.ffn_down


class CpuLayer:
    """Fused operations, in place of the ones of `composed`.

    Args:
        scratch: shared with the products; one thread uses it at a time.
        attention: over packed K and V.
        products: of matrices that are in no chain.
        latents: attention over packed latents.
    """

    def __init__(
        self,
        composed: Backend,
        scratch: Scratch,
        attention: SegmentAttention,
        products: CpuProducts,
        latents: SegmentLatents,
    ) -> None:
        self.composed = composed
        self.chains = LayerChains(scratch)
        self.attention = AttentionLayer(self.chains, composed.mixers[AttentionSpec], attention)
        self.encoder = EncoderLayer(composed.mixers[EncoderAttentionSpec], self.attention)
        self.latents = LatentLayer(
            self.chains, composed.mixers[LatentAttentionSpec], latents, self.attention.merged
        )
        self.recurrent = RecurrentLayer(self.chains, composed.mixers, products)
        self.experts = ExpertLayer(self.chains, composed.ffns)

    @property
    def fused_ffns(self) -> dict[type[Ffn], FeedForward]:
        """Kept nowhere, as a bound method would keep the layer and all that its chains hold."""
        return {MlpSpec: self.mlp_residual, MoeSpec: self.experts, MlpAndMoeSpec: self.experts}

    def out_residual(
        self, x: Floats, mixed: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        assert layer.mixer is not None
        output, post_norm = layer.mixer.output, layer.post_attn_norm
        if not self.has_output(layer):
            return self.composed.out_residual(x, mixed, layer, spec)
        n_tokens, mixed = x.shape[0], np.ascontiguousarray(mixed)

        def make(chain: Chain) -> None:
            y = self.chains.add_norm(chain, n_tokens, layer.mixed_norm, "mixed")
            self.chains.add_residual(chain, y, n_tokens, output, post_norm, spec)

        chain = self.chains.get("out", (layer, spec), n_tokens, make)
        out = np.empty(x.shape, np.float32)
        chain.run(residual=_before(x, output, post_norm, spec), mixed=mixed, out=out)
        return out

    def mlp_residual(
        self, x: Floats, layer_input: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        if not self.has_mlp(layer, spec):
            composed = self.composed.ffns[MlpSpec]
            return np.asarray(composed(x, layer_input, layer, spec))
        n_tokens = x.shape[0]
        source = np.ascontiguousarray(layer_input if spec.parallel else x)

        chain = self.chains.get(
            "mlp", (layer, spec), n_tokens, lambda chain: self.add_mlp(chain, n_tokens, layer, spec)
        )
        out = np.empty(x.shape, np.float32)
        before = _before(x, down_of(layer), layer.post_ffn_norm, spec)
        chain.run(x=source, residual=before, out=out)
        return out

    def add_layer_input(
        self, x: Floats, row: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        n_tokens, width = row.shape
        if not self.has_layer_input(layer, width):
            return self.composed.add_layer_input(x, row, layer, spec)
        chain = self.chains.get(
            "per-layer",
            (layer, spec),
            n_tokens,
            lambda chain: self.add_embedded(chain, n_tokens, layer, spec),
        )
        out = np.empty(x.shape, np.float32)
        chain.run(residual=np.ascontiguousarray(x), row=np.ascontiguousarray(row), out=out)
        return out

    def has_output(self, layer: LayerWeights) -> bool:
        """Whether a chain can run a mixer's output matrix."""
        assert layer.mixer is not None
        return runs(layer.mixer.output) and _is_rms(layer.post_attn_norm)

    def has_mlp(self, layer: LayerWeights, spec: LayerSpec) -> bool:
        """Whether a chain can run a dense block."""
        mlp, ffn = layer.ffn, spec.ffn
        assert isinstance(mlp, MlpWeights)
        assert isinstance(ffn, MlpSpec)
        gate = () if mlp.ffn_gate is None else (mlp.ffn_gate,)
        matrices = (*gate, mlp.ffn_up, mlp.ffn_down)
        return runs(*matrices) and ffn.n_ff % LANES == 0 and _is_rms(layer.post_ffn_norm)

    def has_layer_input(self, layer: LayerWeights, width: int) -> bool:
        """Whether a chain can add embeddings of `width`."""
        weights = layer.per_layer_input
        assert weights is not None
        return runs(weights.inp_gate, weights.proj) and width % LANES == 0

    def add_mlp(self, chain: Chain, n_tokens: int, layer: LayerWeights, spec: LayerSpec) -> None:
        """From "x" and "residual" to "out", by these names of the chain."""
        mlp, ffn = layer.ffn, spec.ffn
        assert isinstance(mlp, MlpWeights)
        assert isinstance(ffn, MlpSpec)
        h = self.chains.add_norm(chain, n_tokens, layer.ffn_norm)
        hidden = self.chains.add_mlp(chain, h, n_tokens, ffn, mlp.ffn_gate, mlp.ffn_up)
        y = self.chains.add_norm(chain, n_tokens, layer.hidden_norm, hidden)
        self.chains.add_residual(chain, y, n_tokens, mlp.ffn_down, layer.post_ffn_norm, spec)

    def add_embedded(
        self, chain: Chain, n_tokens: int, layer: LayerWeights, spec: LayerSpec
    ) -> None:
        """From "residual" and "row" to "out", by these names of the chain."""
        weights = layer.per_layer_input
        assert weights is not None
        hidden = self.chains.add_embedded_gate(chain, n_tokens, weights.inp_gate)
        self.chains.add_residual(chain, hidden, n_tokens, weights.proj, weights.post_norm, spec)

    def linear(self, x: Floats, layer: Linear) -> Floats:
        n_tokens = x.shape[0]
        if not runs(layer):
            return np.asarray(self.composed.linear(x, layer))

        def make(chain: Chain) -> None:
            add_products(chain, "x", n_tokens, [with_bias(layer, "out")])

        out = np.empty((n_tokens, layer.weight.shape[0]), np.float32)
        chain = self.chains.get("linear", (layer,), n_tokens, make)
        chain.run(x=np.ascontiguousarray(x), out=out)
        return out

    def norm(self, x: Floats, norm: Norm) -> Floats:
        x = np.ascontiguousarray(x)
        n_rows = x.size // x.shape[-1]

        def make(chain: Chain) -> None:
            self.chains.add_norm(chain, n_rows, norm, "x", "out")

        out = np.empty(x.shape, np.float32)
        self.chains.get("norm", (norm,), n_rows, make).run(x=x, out=out)
        return out

    def logits(self, x: Floats, output_norm: Norm, output: Linear, spec: ModelSpec) -> Floats:
        n_tokens = x.shape[0]
        if not runs(output):
            return self.composed.logits(x, output_norm, output, spec)
        x = np.ascontiguousarray(x)

        def make(chain: Chain) -> None:
            h = self.chains.add_norm(chain, n_tokens, output_norm)
            add_products(chain, h, n_tokens, [with_bias(output, "out")])

        chain = self.chains.get("logits", (output, output_norm), n_tokens, make)
        out = np.empty((n_tokens, output.weight.shape[0]), np.float32)
        chain.run(x=x, out=out)
        return capped_logits(out, spec)

    def forget(self) -> None:
        """Drop all chains, so that they are made again."""
        self.chains.forget()

    def mixers(self) -> dict[type[Mixer], Mix]:
        return {
            **self.composed.mixers,
            AttentionSpec: self.attention,
            EncoderAttentionSpec: self.encoder,
            LatentAttentionSpec: self.latents,
            DeltaNetSpec: self.recurrent,
            ShortConvSpec: self.recurrent,
            Mamba2Spec: self.recurrent,
        }

    def ffns(self) -> dict[type[Ffn], FeedForward]:
        return {**self.composed.ffns, **self.fused_ffns}

    def operations(self) -> dict[str, Any]:
        """For `dataclasses.replace` of the composed backend."""
        return {
            "mixers": self.mixers(),
            "out_residual": self.out_residual,
            "linear": self.linear,
            "norm": self.norm,
            "add_layer_input": self.add_layer_input,
            "ffns": self.ffns(),
            "logits": self.logits,
        }
