"""The products of a feed-forward block up to its last matrix."""

from __future__ import annotations

from torch import Tensor

from localkv.arch.spec import MlpSpec
from localkv.kernels.activation import activate
from localkv.kernels.gpu.products.epilogues import GATED, PLAIN
from localkv.kernels.gpu.products.products import gate_up, linears, normed
from localkv.kernels.layer_weights import MlpWeights, Norm


def why_not(spec: MlpSpec) -> str:
    """What a block has that no kernel does, in words; empty if there is nothing."""
    if spec.activation not in (GATED if spec.gated else PLAIN):
        return f"{spec.activation} {'with' if spec.gated else 'without'} a gate"
    return ""


def hidden_rows(source: Tensor, by: Norm | None, weights: MlpWeights, spec: MlpSpec) -> Tensor:
    """What a dense block's last matrix reads: two launches, unless few of the gate's values are
    kept, which torch does."""
    if weights.ffn_gate is None:
        h = normed(source, by, (weights.ffn_up,))
        return linears(h, (weights.ffn_up,), block=spec)[0]
    pair = (weights.ffn_gate, weights.ffn_up)
    h = normed(source, by, pair)
    if not spec.sparsity:
        return gate_up(h, *pair, spec.activation)
    gate, up = linears(h, pair)
    hidden: Tensor = activate(gate, up, spec)
    return hidden
