"""The tensors of a layer's feed-forward block."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from localkv.arch.spec import Ffn, MlpAndMoeSpec, MlpSpec, MoeSpec, NormSpec
from localkv.cache.arrays import Array
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.layer_weights import (
    FfnWeights,
    Linear,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
    Norm,
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

    def stack(name: str, n_out: int, n_in: int) -> PackedTensor:
        return read.late_matrix(f"{at}ffn_{name}_exps.weight", n_experts, n_out, n_in)

    def bias(name: str, n_out: int) -> Array | None:
        tensor = f"{at}ffn_{name}_exps.bias"
        return read.vector(tensor, n_experts, n_out) if moe.biased or read.has(tensor) else None

    def optional(tensor: str, n: int) -> Array | None:
        return read.vector(f"{at}{tensor}", n) if read.has(f"{at}{tensor}") else None

    experts: dict[str, Any]
    if moe.gated and read.has(f"{at}ffn_gate_up_exps.weight"):
        experts = {
            "ffn_gate_exps": None,
            "ffn_up_exps": None,
            "ffn_gate_up_exps": stack("gate_up", 2 * n_ff, n_embd),
            "gate_up_bias": bias("gate_up", 2 * n_ff),
        }
    else:
        experts = {
            "ffn_gate_exps": stack("gate", n_ff, n_embd) if moe.gated else None,
            "ffn_up_exps": stack("up", n_ff, n_embd),
            "gate_bias": bias("gate", n_ff) if moe.gated else None,
            "up_bias": bias("up", n_ff),
        }
    return MoeWeights(
        ffn_gate_inp=read.linear(f"{at}ffn_gate_inp", n_experts, n_embd, bias_required=moe.biased),
        **experts,
        ffn_down_exps=stack("down", n_embd, n_ff),
        down_bias=bias("down", n_embd),
        down_scale=optional("ffn_down_exps.scale", n_experts),
        exp_probs_b=read.vector(_selection_bias(read, at), n_experts)
        if moe.selection_bias
        else None,
        shared=_mlp(read, moe.shared, n_embd, at, "_shexp") if moe.n_ff_shared else None,
        ffn_gate_inp_shexp=read.vector(f"{at}ffn_gate_inp_shexp.weight", n_embd)
        if moe.shared_gated
        else None,
        router_norm=_router_norm(read, moe.router_norm, n_embd, at),
    )


def _router_norm(read: TensorReader, spec: NormSpec | None, n_embd: int, at: str) -> Norm | None:
    if spec is None:
        return None
    scale = read.values(f"{at}{spec.tensor}.scale", n_embd) / np.float32(math.sqrt(n_embd))
    arrays = read.backend.arrays
    return Norm(spec, arrays.floating(arrays.from_numpy(scale)))


def _selection_bias(read: TensorReader, at: str) -> str:
    """The tensor's name, which in a few files has no suffix."""
    bare = f"{at}exp_probs_b"
    return bare if read.has(bare) else f"{bare}.bias"
