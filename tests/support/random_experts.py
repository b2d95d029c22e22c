"""Random layers with routed experts, of any specification, in NumPy as a file has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from localkv.arch.spec import LayerSpec, MlpAndMoeSpec, MlpSpec, MoeSpec, NormSpec
from localkv.kernels.layer_weights import (
    LayerWeights,
    Linear,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
    Norm,
)
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.random_packed import random_packed

RMS = NormSpec("norm", "rms", 1e-5)
TYPES = ("q4_0", "q4_K", "q8_0", "q5_1", "q6_K", "iq4_nl", "f16", "bf16", "f32")
"""In panels, in place and in rows; with minima, and with scales of halves of blocks."""
Prepare = Callable[[PackedTensor], PackedTensor]
Give = Callable[[np.ndarray], np.ndarray]


def random_moe(rng: random.Random) -> MoeSpec:
    """Few experts, small ones."""
    gating = rng.choice(("softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus"))
    n_experts = rng.choice((1, 2, 3, 4, 8, 12, 17, 64))
    grouped = n_experts % 4 == 0 and gating != "softmax_of_chosen" and rng.random() < 0.4
    n_groups = rng.choice((2, 4)) if grouped else 1
    n_groups_used = rng.randint(1, n_groups)
    most = n_experts // n_groups * n_groups_used
    activation = rng.choice(("silu", "silu", "gelu", "relu", "relu2", "swiglu_oai"))
    return MoeSpec(
        n_experts,
        rng.choice((1, min(2, most), min(4, most), most)),
        n_ff=rng.choice((256, 512)),
        n_ff_shared=rng.choice((0, 0, 64)),
        renormalise=rng.random() < 0.5,
        gating=gating,
        selection_bias=gating != "softmax_of_chosen" and rng.random() < 0.3,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
        weights_scale=rng.choice((1.0, 2.5)),
        shared_scale=rng.choice((1.0, 0.5)),
        shared_gated=rng.random() < 0.5,
        activation=activation,
        gated=activation == "swiglu_oai" or rng.random() < 0.8,
        biased=rng.random() < 0.3,
        router_reads_input=rng.random() < 0.2,
        weighs_input=rng.random() < 0.2,
    )


def random_layer(
    rng: random.Random, moe: MoeSpec, names: tuple[str, str, str], n_embd: int, halves: bool
) -> tuple[LayerSpec, LayerWeights]:
    """A layer without a mixer.

    Args:
        names: types of gate, of up and of down.
        halves: activations are rounded to halves before F16 weights.
    """
    values = np.random.default_rng(rng.randrange(1 << 30))

    def matrix(name: str, *shape: int) -> PackedTensor:
        packed = random_packed(name, *shape, seed=rng.randrange(1 << 30))
        if name == "f16":
            packed = replace(packed, halves_activations=halves)
        return packed

    def floats(*shape: int, gain: float = 0.3, centre: float = 0.0) -> np.ndarray:
        return (centre + gain * values.standard_normal(shape)).astype(np.float32)

    def norm(kind: NormSpec) -> Norm:
        bias = floats(n_embd) if kind.kind == "layer" else None
        return Norm(kind, floats(n_embd, centre=1.0), bias)

    def block(name: str, n_ff: int, gated: bool) -> MlpWeights:
        gate = Linear(matrix(name, n_ff, n_embd)) if gated else None
        bias = floats(n_embd) if rng.random() < 0.3 else None
        up, down = matrix(name, n_ff, n_embd), matrix(name, n_embd, n_ff)
        return MlpWeights(gate, Linear(up), Linear(down, bias))

    def some(x: np.ndarray, chance: float) -> np.ndarray | None:
        return x if rng.random() < chance else None

    n, n_ff = moe.n_experts, moe.n_ff
    gate, up, down = names
    chance = 1.0 if moe.biased else 0.0
    router = random_packed("f32", n, n_embd, seed=rng.randrange(1 << 30))
    router = PackedTensor(
        router.format, (router.decode() * 2 / n_embd**0.5).view(np.uint8), router.shape
    )
    weights = MoeWeights(
        Linear(router, some(floats(n), chance)),
        matrix(gate, n, n_ff, n_embd) if moe.gated else None,
        matrix(up, n, n_ff, n_embd),
        matrix(down, n, n_embd, n_ff),
        exp_probs_b=some(floats(n), 1.0 if moe.selection_bias else 0.0),
        gate_bias=some(floats(n, n_ff), chance),
        up_bias=some(floats(n, n_ff), chance),
        down_bias=some(floats(n, n_embd), chance),
        down_scale=some(floats(n, centre=1.0), 0.3),
    )
    if moe.gated and gate == up and rng.random() < 0.4:
        both = matrix(gate, n, 2 * n_ff, n_embd)
        bias = some(floats(n, 2 * n_ff), chance)
        weights = replace(
            weights,
            ffn_gate_exps=None,
            ffn_up_exps=None,
            gate_bias=None,
            up_bias=None,
            ffn_gate_up_exps=both,
            gate_up_bias=bias,
        )
    if moe.n_ff_shared:
        # blocks of 256 do not fit
        name = up if FORMATS[up].block_size <= 32 else "q8_0"
        weights = replace(weights, shared=block(name, moe.n_ff_shared, moe.gated))
        if moe.shared_gated:
            weights = replace(weights, ffn_gate_inp_shexp=floats(n_embd, gain=0.1))
    layer_norm = NormSpec("norm", "layer", 1e-5)
    spec = LayerSpec(
        None,
        moe,
        None,
        rng.choice((RMS, RMS, layer_norm, None)),
        post_ffn_norm=rng.choice((None, None, RMS, layer_norm)),
        residual_scale=rng.choice((1.0, 1.0, 0.4)),
        parallel=rng.random() < 0.2,
    )
    layer = LayerWeights(
        None,
        weights,
        None,
        spec.ffn_norm and norm(spec.ffn_norm),
        post_ffn_norm=spec.post_ffn_norm and norm(spec.post_ffn_norm),
    )
    if rng.random() < 0.2:
        both_spec = MlpAndMoeSpec(MlpSpec(64, "gelu"), moe, RMS, RMS, RMS)
        both_moe = replace(weights, router_norm=norm(RMS))
        dense = block("q8_0", 64, True)
        parts = MlpAndMoeWeights(dense, both_moe, norm(RMS), norm(RMS), norm(RMS))
        spec = replace(spec, ffn=both_spec, parallel=False)
        layer = replace(layer, ffn=parts)
    return spec, layer


def with_each(part: Any, prepare: Prepare, give: Give) -> Any:
    """A part of the weights with its matrices prepared, and its vectors as `give` gives them."""
    match part:
        case PackedTensor():
            return prepare(part)
        case np.ndarray():
            return give(part)
        case Linear() | Norm() | MlpWeights() | MoeWeights() | MlpAndMoeWeights() | LayerWeights():
            names = part.__dataclass_fields__
            changed = {name: with_each(getattr(part, name), prepare, give) for name in names}
            return replace(part, **changed)
    return part


def as_given(x: np.ndarray) -> np.ndarray:
    return x
