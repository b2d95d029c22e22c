"""The tensors of a layer's feed-forward block."""

from __future__ import annotations

from localkv.arch.ffn_spec import Ffn, MlpAndMoeSpec, MlpSpec, MoeSpec
from localkv.kernels.layer_weights import (
    FfnWeights,
    Linear,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
)
from localkv.loader.tensor_reader import TensorReader


def ffn_weights(read: TensorReader, spec: Ffn, n_embd: int, at: str) -> FfnWeights:
    """Those of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    match spec:
        case MlpSpec():
            return _mlp(read, spec, n_embd, at)
        case MoeSpec():
            return _moe(read, spec, n_embd, at)
        case MlpAndMoeSpec():
            return MlpAndMoeWeights(
                mlp=_mlp(read, spec.mlp, n_embd, at),
                moe=_moe(read, spec.moe, n_embd, at),
                post_mlp_norm=read.norm(spec.post_mlp_norm, n_embd, at),
                post_moe_norm=read.norm(spec.post_moe_norm, n_embd, at),
                moe_norm=read.norm(spec.moe_norm, n_embd, at),
            )


def _mlp(read: TensorReader, spec: MlpSpec, n_embd: int, at: str, suffix: str = "") -> MlpWeights:
    gate_name, up_name = f"{at}ffn_gate{suffix}", f"{at}ffn_up{suffix}"
    gate: Linear | None = None
    if not spec.gated:
        up = read.linear(up_name, spec.n_ff, n_embd)
    elif read.has(f"{gate_name}.weight"):
        gate = read.linear(gate_name, spec.n_ff, n_embd)
        up = read.linear(up_name, spec.n_ff, n_embd)
    else:  # one tensor, the gate's rows first
        gate, up = read.fused_linear(up_name, (spec.n_ff, spec.n_ff), n_embd)
    return MlpWeights(gate, up, read.linear(f"{at}ffn_down{suffix}", n_embd, spec.n_ff))


def _moe(read: TensorReader, moe: MoeSpec, n_embd: int, at: str) -> MoeWeights:
    n_experts, n_ff = moe.n_experts, moe.n_ff
    shared, gate = None, None
    if moe.n_ff_shared:
        shared_spec = MlpSpec(moe.n_ff_shared, moe.activation)
        shared = _mlp(read, shared_spec, n_embd, at, "_shexp")
    if moe.shared_gated:
        gate = read.vector(f"{at}ffn_gate_inp_shexp.weight", n_embd)
    return MoeWeights(
        ffn_gate_inp=read.linear(f"{at}ffn_gate_inp", n_experts, n_embd),
        ffn_gate_exps=read.matrix(f"{at}ffn_gate_exps.weight", n_experts, n_ff, n_embd),
        ffn_up_exps=read.matrix(f"{at}ffn_up_exps.weight", n_experts, n_ff, n_embd),
        ffn_down_exps=read.matrix(f"{at}ffn_down_exps.weight", n_experts, n_embd, n_ff),
        shared=shared,
        ffn_gate_inp_shexp=gate,
    )
