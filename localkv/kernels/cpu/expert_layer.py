"""Feed-forward blocks with routed experts on the CPU, each one chain of compiled workers.

What has no kernel (rows of floats that are no whole number of vectors) is left to the composed
operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from localkv.arch.ffn_spec import Ffn, MlpAndMoeSpec, MoeSpec
from localkv.arch.spec import LayerSpec
from localkv.kernels.backend import FeedForward
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.layer_chains import LayerChains, adds_at_once
from localkv.kernels.cpu.moe.expert_steps import ExpertSteps, experts_run, mlp_runs
from localkv.kernels.cpu.runtime.chain import Chain
from localkv.kernels.layer_weights import LayerWeights, MlpAndMoeWeights, MoeWeights


class ExpertLayer:
    """Fused operations, in place of those of `composed`."""

    def __init__(
        self,
        chains: LayerChains,
        composed: Mapping[type[Ffn], FeedForward],
    ) -> None:
        self.chains = chains
        self.composed = composed

    def moe_residual(
        self, x: Floats, layer_input: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        weights, moe, post_norm = layer.ffn, spec.ffn, layer.post_ffn_norm
        assert isinstance(weights, MoeWeights)
        assert isinstance(moe, MoeSpec)
        if not experts_run(weights):
            return np.asarray(self.composed[MoeSpec](x, layer_input, layer, spec))
        n_tokens, n_embd = x.shape
        given = {"x": layer_input if spec.parallel else x, "residual": x}
        if moe.router_reads_input:
            given["routed"] = layer_input

        def make(chain: Chain) -> None:
            steps = ExpertSteps(self.chains, chain, n_tokens, n_embd)
            h = self.chains.add_norm(chain, n_tokens, layer.ffn_norm)
            routed = "routed" if moe.router_reads_input else h
            if adds_at_once(post_norm, spec):
                steps.add_experts(h, routed, moe, weights, "out", "residual")
                return
            y = chain.take(4 * n_tokens * n_embd)
            steps.add_experts(h, routed, moe, weights, y)
            scale = spec.residual_scale
            self.chains.add_normed(
                chain, y, n_tokens, n_embd, post_norm, "residual", "out", scale=scale
            )

        return self._run("moe", layer, spec, make, given)

    def both_residual(
        self, x: Floats, layer_input: Floats, layer: LayerWeights, spec: LayerSpec
    ) -> Floats:
        weights, ffn = layer.ffn, spec.ffn
        assert isinstance(weights, MlpAndMoeWeights)
        assert isinstance(ffn, MlpAndMoeSpec)
        moe = weights.moe
        if not (experts_run(moe) and mlp_runs(weights.mlp)):
            return np.asarray(self.composed[MlpAndMoeSpec](x, layer_input, layer, spec))
        n_tokens, n_embd = x.shape

        def make(chain: Chain) -> None:
            chains, n_bytes = self.chains, 4 * n_tokens * n_embd
            steps = ExpertSteps(chains, chain, n_tokens, n_embd)
            h = chains.add_norm(chain, n_tokens, layer.ffn_norm)
            dense = steps.add_mlp(h, ffn.mlp, weights.mlp)
            dense = chains.add_norm(chain, n_tokens, weights.post_mlp_norm, dense)
            routed = chains.add_norm(chain, n_tokens, moe.router_norm)
            h = chains.add_norm(chain, n_tokens, weights.moe_norm)
            y, both = chain.take(n_bytes), chain.take(n_bytes)
            steps.add_experts(h, routed, ffn.moe, moe, y)
            chains.add_normed(chain, y, n_tokens, n_embd, weights.post_moe_norm, dense, both)
            post_norm, scale = layer.post_ffn_norm, spec.residual_scale
            chains.add_normed(
                chain, both, n_tokens, n_embd, post_norm, "residual", "out", scale=scale
            )

        return self._run("moe", layer, spec, make, {"x": x, "residual": x})

    def _run(
        self,
        name: str,
        layer: LayerWeights,
        spec: LayerSpec,
        make: Callable[[Chain], None],
        given: dict[str, Floats],
    ) -> Floats:
        x = given["residual"]
        chain = self.chains.get(name, (layer, spec), x.shape[0], make)
        out = np.empty(x.shape, np.float32)
        chain.run(**{key: np.ascontiguousarray(rows) for key, rows in given.items()}, out=out)
        return out
