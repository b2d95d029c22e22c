"""The steps of routed experts in a chain, from what they read to the sum of what they give."""

from __future__ import annotations

from dataclasses import dataclass

from localkv.arch.spec import MlpSpec, MoeSpec
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layer_chains import LayerChains, activate_source, has_common_kernel
from localkv.kernels.cpu.linear.matrices import has_kernel
from localkv.kernels.cpu.linear.products import add_products, with_bias
from localkv.kernels.cpu.moe.job import COMBINED, CombineJob, HalveJob
from localkv.kernels.cpu.moe.routing import (
    GROUPING,
    ROWS,
    Routing,
    add_routing,
    route_source,
    taken,
)
from localkv.kernels.cpu.moe.stack_products import (
    Rows,
    StackProduct,
    add_copies,
    add_stack_products,
)
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Where
from localkv.kernels.layer_weights import Linear, MlpWeights, MoeWeights, Norm
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads

FEW_VALUES = 1 << 13
"""Up to this many are rounded sooner by one thread than others start."""


def _alike(*weights: PackedTensor | Linear | None) -> bool:
    """Whether there are kernels for all that there is, which read the same activations."""
    found = [w.weight if isinstance(w, Linear) else w for w in weights if w is not None]
    return all(map(has_kernel, found)) and len({w.halves_activations for w in found}) <= 1


def mlp_runs(mlp: MlpWeights) -> bool:
    """Whether a dense block can be steps of a chain."""
    return (
        _alike(mlp.ffn_gate, mlp.ffn_up)
        and _alike(mlp.ffn_down)
        and mlp.ffn_down.weight.shape[-1] % LANES == 0
    )


def experts_run(moe: MoeWeights) -> bool:
    """Whether routed experts can be steps of a chain."""
    down = moe.ffn_down_exps
    return (
        _alike(moe.ffn_gate_inp)
        and _alike(moe.ffn_gate_exps, moe.ffn_up_exps, moe.ffn_gate_up_exps)
        and _alike(down)
        and down.shape[-1] % LANES == 0
        and down.shape[-2] % LANES == 0
        and (moe.shared is None or mlp_runs(moe.shared))
    )


def expert_sources(moe: MoeSpec) -> list[KernelSource]:
    """The kernels of routed experts besides those of products."""
    sources = [route_source(moe), GROUPING, ROWS]
    return sources if has_common_kernel(moe.expert) else [*sources, activate_source(moe.expert)]


@dataclass
class ExpertSteps:
    """Adds steps to a chain for some tokens.

    Attributes:
        n_embd: values of a token.
    """

    chains: LayerChains
    chain: Chain
    n_tokens: int
    n_embd: int

    def rounded(self, x: Where, n_values: int, weight: PackedTensor) -> Where:
        """`x` as the product with a weight takes it."""
        if not weight.halves_activations:
            return x
        out = taken(self.chain, 4 * n_values)
        self._add_rounding(x, out.where, n_values)
        return out.where

    def _add_rounding(self, x: Where, out: Where, n: int) -> None:
        job = HalveJob(0, n, Memory(x, 4 * n), Memory(out, 4 * n))
        self.chain.add(specialized(ROWS)["halve"], job, n_threads() if n > FEW_VALUES else 1)

    def add_mlp(self, h: Where, spec: MlpSpec, mlp: MlpWeights) -> Where:
        """What a dense block makes of `h`: float32 [n_tokens, n_embd]."""
        n = self.n_tokens
        x = self.rounded(h, n * self.n_embd, mlp.ffn_up.weight)
        hidden: Where = self.chains.add_mlp(self.chain, x, n, spec, mlp.ffn_gate, mlp.ffn_up)
        hidden = self.rounded(hidden, n * spec.n_ff, mlp.ffn_down.weight)
        out = taken(self.chain, 4 * n * self.n_embd)
        add_products(self.chain, hidden, n, [with_bias(mlp.ffn_down, out.where)])
        return out.where

    def add_normed(
        self, y: Where, norm: Norm | None, before: Where, out: Where, scale: float = 1.0
    ) -> None:
        """out = before + scale * norm(y); `y` is overwritten."""
        n, n_embd = self.n_tokens, self.n_embd
        self.chains.add_normed(self.chain, y, n, n_embd, norm, before, out, scale=scale)

    def add_routing(self, routed: Where, moe: MoeSpec, weights: MoeWeights) -> Routing:
        """Router and choice, for the rows that the router reads."""
        router, n = weights.ffn_gate_inp, self.n_tokens
        logits = taken(self.chain, 4 * n * moe.n_experts)
        x = self.rounded(routed, n * self.n_embd, router.weight)
        add_products(self.chain, x, n, [with_bias(router, logits.where)])
        scale = self.chains.floats(moe.weights_scale)
        return add_routing(self.chain, logits.where, n, moe, weights.exp_probs_b, scale)

    def _add_hidden(self, rows: Rows, routing: Routing, moe: MoeSpec, weights: MoeWeights) -> Where:
        """The hidden rows of all experts' blocks: float32 [n_pairs, n_ff]."""
        both, n_ff = weights.ffn_gate_up_exps, moe.n_ff
        n_bytes = 4 * routing.n_pairs * n_ff
        hidden, up = self.chain.take(n_bytes), None
        if both is not None:
            up = self.chain.take(n_bytes)
            bias = weights.gate_up_bias
            products = [
                StackProduct(both, hidden, n_ff, bias),
                StackProduct(both, up, n_ff, bias, first=n_ff),
            ]
        else:
            assert weights.ffn_up_exps is not None
            if weights.ffn_gate_exps is None:
                products = [StackProduct(weights.ffn_up_exps, hidden, n_ff, weights.up_bias)]
            else:
                up = self.chain.take(n_bytes)
                products = [
                    StackProduct(weights.ffn_gate_exps, hidden, n_ff, weights.gate_bias),
                    StackProduct(weights.ffn_up_exps, up, n_ff, weights.up_bias),
                ]
        add_stack_products(self.chain, routing, rows, products)
        self.chains.add_activation(self.chain, moe.expert, routing.n_pairs, hidden, up)
        if weights.ffn_down_exps.halves_activations:
            self._add_rounding(hidden, hidden, routing.n_pairs * n_ff)
        return hidden

    def add_experts(
        self,
        h: Where,
        routed: Where,
        moe: MoeSpec,
        weights: MoeWeights,
        out: Where,
        residual: Where | None = None,
    ) -> None:
        """out = residual + what the experts give, or without it; all float32 [n_tokens, n_embd].

        Args:
            h: what experts read.
            routed: what the router reads.
        """
        routing = self.add_routing(routed, moe, weights)
        both, n_embd = weights.ffn_gate_up_exps, self.n_embd
        first = weights.ffn_up_exps if both is None else both
        assert first is not None
        x, n_rows = h, self.n_tokens
        if moe.weighs_input:
            x = add_copies(self.chain, routing, h, n_embd, routing.weights).where
            n_rows = routing.n_pairs
        x = self.rounded(x, n_rows * n_embd, first)
        rows = Rows(x, n_embd, by_token=not moe.weighs_input)
        hidden = Rows(self._add_hidden(rows, routing, moe, weights), moe.n_ff, by_token=False)
        y = taken(self.chain, 4 * routing.n_pairs * n_embd)
        down = StackProduct(weights.ffn_down_exps, y.where, n_embd)
        add_stack_products(self.chain, routing, hidden, [down])
        shared: Where | None = None
        if weights.shared is not None:
            shared = self.add_mlp(h, moe.shared, weights.shared)
        self._add_sum(h, y, shared, routing, moe, weights, out, residual)

    def _add_sum(
        self,
        h: Where,
        y: Memory,
        shared: Where | None,
        routing: Routing,
        moe: MoeSpec,
        weights: MoeWeights,
        out: Where,
        residual: Where | None,
    ) -> None:
        """The last step."""
        n, n_embd, gate = self.n_tokens, self.n_embd, weights.ffn_gate_inp_shexp
        n_bytes = 4 * n * n_embd
        scale, bias = weights.down_scale, weights.down_bias
        job = CombineJob(
            next_part=0,
            n_tokens=n,
            n=n_embd,
            n_used=routing.n_used,
            rows=routing.rows,
            experts=routing.experts,
            y=y,
            weights=0 if moe.weighs_input else routing.weights,
            down_scale=0 if scale is None else Memory(scale, 4 * moe.n_experts),
            down_bias=0 if bias is None else Memory(bias, 4 * moe.n_experts * n_embd),
            shared=0 if shared is None else Memory(shared, n_bytes),
            shared_scale=self.chains.floats(moe.shared_scale),
            shared_gate=0 if gate is None else Memory(gate, 4 * n_embd),
            h=0 if gate is None else Memory(h, n_bytes),
            residual=0 if residual is None else Memory(residual, n_bytes),
            out=Memory(out, n_bytes),
        )
        n_parts = -(-n_embd // COMBINED)
        self.chain.add(specialized(ROWS)["combine"], job, min(n_threads(), n * n_parts))
