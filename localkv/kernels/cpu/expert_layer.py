"""Feed-forward blocks with routed experts on the CPU, each one chain of compiled workers.

What has no kernel (rows of floats that are no whole number of vectors) is left to the composed
operations.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from localkv.arch.spec import Ffn, LayerSpec, MlpAndMoeSpec, MoeSpec
from localkv.kernels.backend import FeedForward
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.layer_chains import LayerChains, adds_at_once
from localkv.kernels.cpu.moe.expert_steps import ExpertSteps, experts_run, mlp_runs
from localkv.kernels.cpu.runtime.chain import Chain
from localkv.kernels.layer_weights import LayerWeights, MlpAndMoeWeights, MoeWeights


class ExpertLayer:
    """Both kinds of blocks with experts, in place of those of `composed`."""

    def __init__(
        self,
        chains: LayerChains,
        composed: Mapping[type[Ffn], FeedForward],
    ) -> None:
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
        n_embd = layer.moe.ffn_down_exps.shape[-2]
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
