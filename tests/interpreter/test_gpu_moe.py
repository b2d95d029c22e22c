"""Routed experts on packed stacks, against the plain reference in float64."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from localkv.arch.spec import MoeSpec
from localkv.kernels.gpu import moe as gpu_moe
from localkv.kernels.gpu.moe import expert_tiles, route
from localkv.kernels.gpu.products.products import planes_of
from localkv.kernels.layer_weights import Linear, MlpWeights, MoeWeights
from localkv.kernels.moe import route as plain_route
from localkv.quant_formats.packed_tensor import PackedTensor
from support.cpu_ops import moe_mlp
from support.gpu_products import EXACT, error, far, prepared, with_rows
from support.quick import quick
from support.random_packed import random_packed

N_EMBD, N_FF, N_EXPERTS = 256, 256, 5


pytestmark = pytest.mark.usefixtures("large_tiles")


def unprepared(part: Any) -> Any:
    """For the reference, which reads the file's rows, and in float64."""
    if isinstance(part, PackedTensor):
        return PackedTensor(part.format, part.rows, part.shape, part.halves_activations)
    if isinstance(part, torch.Tensor):
        return part.double()
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: unprepared(getattr(part, f.name)) for f in fields(part)})
    return part


def experts_of(name: str, down: str, *, shared: bool = False, gated: bool = False) -> MoeWeights:
    router = random_packed("f32", N_EXPERTS, N_EMBD, seed=1)
    router.decode()[4] = -100.0  # nobody wants the last expert
    block = [Linear(prepared("q8_0", 96, N_EMBD, seed=5)), Linear(prepared("q8_0", 96, N_EMBD)),
             Linear(prepared("q8_0", N_EMBD, 96, seed=6))]  # fmt: skip
    return MoeWeights(
        Linear(with_rows(router)),
        prepared(name, N_EXPERTS, N_FF, N_EMBD, seed=2),
        prepared(name, N_EXPERTS, N_FF, N_EMBD, seed=3),
        prepared(down, N_EXPERTS, N_EMBD, N_FF, seed=4),
        MlpWeights(*block) if shared else None,
        torch.randn(N_EMBD) * 0.1 if gated else None,
    )


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("n_experts", "n_used"), [(6, 2), (64, 8), (60, 4), (3, 3), (4, 1)])
def test_routing(n_experts: int, n_used: int, renormalise: bool) -> None:
    moe = MoeSpec(n_experts, n_used, n_ff=8, renormalise=renormalise)
    logits = torch.randn(7, n_experts) * 4
    logits[3] = 0.0
    logits[3, : n_used + 1] += torch.arange(n_used + 1)[:n_experts] * 0.5
    experts, weights = route(logits, moe)
    want_experts, want_weights = plain_route(logits, moe)
    assert torch.equal(experts.long(), want_experts)
    torch.testing.assert_close(weights, want_weights)


def test_routing_where_all_weights_vanish() -> None:
    """The sum is never taken as less than 2 ** -14."""
    logits = torch.zeros(1, 300)
    logits[0, 7] = 200.0
    moe = MoeSpec(300, 2, n_ff=8)
    torch.testing.assert_close(route(logits, moe)[1], plain_route(logits, moe)[1])


def test_routing_of_nan() -> None:
    """Weights show it, and the experts exist."""
    moe = MoeSpec(6, 2, n_ff=8)
    logits = torch.randn(3, 6)
    logits[0], logits[2, 4] = torch.nan, torch.nan
    experts, weights = route(logits, moe)
    assert weights.isnan().all(1).tolist() == [True, False, True]
    assert ((experts >= 0) & (experts < 6)).all()


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus"])
@pytest.mark.parametrize(
    "changes",
    [
        {"renormalise": False, "weights_scale": 2.5},
        {"selection_bias": True},
        {"selection_bias": True, "n_groups": 4, "n_groups_used": 2},
        {"n_groups": 3, "n_groups_used": 1, "weights_scale": 0.5},
    ],
    ids=str,
)
def test_kinds_of_routing(changes: dict[str, Any], gating: Any) -> None:
    moe = replace(MoeSpec(12, 3, n_ff=8, gating=gating), **changes)
    logits = torch.randn(9, 12) * 3
    logits[2, :5] = torch.tensor([25.0, 60.0, -30.0, -20.0, -2.0])
    bias = torch.randn(12) if moe.selection_bias else None
    experts, weights = route(logits, moe, bias)
    want_experts, want_weights = plain_route(logits, moe, bias)
    assert torch.equal(experts.long(), want_experts)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("tile", [1, 4, 16])
def test_tiles_hold_each_pair_once(tile: int) -> None:
    experts = torch.randint(0, 6, (13, 2), dtype=torch.int32)
    experts[experts == 2] = 3  # nobody's
    tiles = expert_tiles(experts, 6, tile)
    seen = []
    for expert, first, end in zip(tiles.expert, tiles.first, tiles.end, strict=True):
        if expert < 6:
            pairs = tiles.order[first:end]
            assert 0 < len(pairs) <= tile
            assert (experts.flatten()[pairs.long()] == expert).all()
            seen += pairs.tolist()
    assert sorted(seen) == list(range(26))


@pytest.mark.parametrize("expert", [-(2**31), -1, 6, 2**31 - 1, None])
def test_tiles_of_what_was_in_memory(expert: int | None) -> None:
    """Where kernels are only compiled the router has written nothing: no index is out of bounds."""
    shape, some = (13, 2), torch.iinfo(torch.int32)
    experts = torch.randint(some.min, some.max, shape, dtype=torch.int32)
    if expert is not None:
        experts.fill_(expert)
    assert expert_tiles(experts, 6, 4).order.sort().values.tolist() == list(range(26))


@pytest.mark.parametrize(
    ("n_tokens", "types"),
    quick(
        product(
            (1, 4, 19),
            (
                *(("q4_K", "q6_K"), ("q8_0", "q8_0"), ("f32", "f32"), ("f16", "f16")),
                *(("iq2_s", "iq3_xxs"), ("tq1_0", "nvfp4")),
            ),
        ),
        {
            (1, ("q4_K", "q6_K")),
            (1, ("iq2_s", "iq3_xxs")),
            (4, ("f32", "f32")),
            (4, ("q8_0", "q8_0")),
            (19, ("f16", "f16")),
        },
    ),
    ids=str,
)
def test_experts(types: tuple[str, str], n_tokens: int) -> None:
    """One pair at a time, and in tiles; an expert without tokens."""
    name, down = types
    layer = experts_of(name, down)
    x = torch.rand(n_tokens, N_EMBD)
    moe = MoeSpec(N_EXPERTS, 2, n_ff=N_FF)
    few = n_tokens * 2 <= gpu_moe.FEW_PAIRS * N_EXPERTS
    want = moe_mlp(x.double(), unprepared(layer), moe)
    # three products, one behind the other
    limit = 3 * EXACT if few or name == "f32" else 2e-3
    assert error(gpu_moe.moe_mlp(x, layer, moe), want) < limit


def biases(layer: MoeWeights, n_ff: int) -> MoeWeights:
    """A layer with biases and factors of the experts' outputs."""
    n_ff_up = n_ff * (2 if layer.ffn_gate_up_exps is not None else 1)
    return replace(
        layer,
        gate_bias=torch.randn(N_EXPERTS, n_ff),
        up_bias=torch.randn(N_EXPERTS, n_ff),
        gate_up_bias=torch.randn(N_EXPERTS, n_ff_up),
        down_bias=torch.randn(N_EXPERTS, N_EMBD),
        down_scale=torch.rand(N_EXPERTS) + 0.5,
        exp_probs_b=torch.randn(N_EXPERTS) * 0.1,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"gating": "softmax_of_chosen", "activation": "swiglu_oai", "renormalise": False},
        {"gating": "sigmoid", "activation": "relu", "selection_bias": True, "weights_scale": 2.0},
        {"gating": "sigmoid", "weighs_input": True, "renormalise": False},
        {"activation": "gelu"},
        {"activation": "relu2", "gated": False},
        {"limit": 0.6},
        {"limit": 0.6, "limits_gate": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("n_tokens", [1, pytest.param(19, marks=pytest.mark.slow)])
def test_kinds_of_experts(changes: dict[str, Any], fused: bool, n_tokens: int) -> None:
    """Activations, biases, weights before or after; gate and up in one stack, or no gate."""
    moe = MoeSpec(N_EXPERTS, 2, n_ff=N_FF, **changes)
    layer = experts_of("mxfp4", "mxfp4")
    if fused and moe.gated:
        both = prepared("mxfp4", N_EXPERTS, 2 * N_FF, N_EMBD, seed=7)
        layer = replace(layer, ffn_gate_exps=None, ffn_up_exps=None, ffn_gate_up_exps=both)
    elif not moe.gated:
        layer = replace(layer, ffn_gate_exps=None)
    layer = biases(layer, N_FF)
    if not moe.selection_bias:
        layer = replace(layer, exp_probs_b=None)
    x, routed = torch.randn(n_tokens, N_EMBD), torch.randn(n_tokens, N_EMBD)
    want = moe_mlp(x.double(), unprepared(layer), moe, routed.double())
    got = gpu_moe.moe_mlp(x, layer, moe, routed)
    assert error(got, want) < (5e-6 if n_tokens == 1 else 2e-3)


@pytest.mark.parametrize("gated", [True, False])
def test_shared_expert_of_another_activation(gated: bool) -> None:
    layer = experts_of("q4_0", "q5_1", shared=True)
    assert layer.shared is not None
    if not gated:
        layer = replace(layer, ffn_gate_exps=None, shared=replace(layer.shared, ffn_gate=None))
    x = torch.rand(1, N_EMBD)
    moe = MoeSpec(N_EXPERTS, 2, N_FF, n_ff_shared=96, activation="relu2", gated=gated)
    want = moe_mlp(x.double(), unprepared(layer), moe)
    assert error(gpu_moe.moe_mlp(x, layer, moe), want) < 3 * EXACT


@pytest.mark.parametrize("limits_gate", [False, True])
def test_limits_of_the_shared_expert(limits_gate: bool) -> None:
    """It has one of its own."""
    layer, x = experts_of("q4_0", "q5_1", shared=True), torch.randn(1, N_EMBD)
    limits = {"limit": 0.5, "shared_limit": 0.9, "limits_gate": limits_gate}
    moe = MoeSpec(N_EXPERTS, 2, N_FF, n_ff_shared=96, **limits)
    want = moe_mlp(x.double(), unprepared(layer), moe)
    assert error(gpu_moe.moe_mlp(x, layer, moe), want) < 3 * EXACT
    plain = moe_mlp(x.double(), unprepared(layer), replace(moe, shared_limit=0.0))
    assert error(plain.float(), want) > 1e-2


@pytest.mark.parametrize("n_tokens", [1, pytest.param(19, marks=pytest.mark.slow)])
def test_experts_that_read_a_latent(n_tokens: int) -> None:
    """Beside a shared expert, which reads the row itself, its gate and the residual."""
    latent, layer = 64, experts_of("q4_0", "q4_0", shared=True, gated=True)
    layer = replace(
        layer,
        ffn_gate_exps=prepared("q4_0", N_EXPERTS, N_FF, latent, seed=2),
        ffn_up_exps=prepared("q4_0", N_EXPERTS, N_FF, latent, seed=3),
        ffn_down_exps=prepared("q4_0", N_EXPERTS, latent, N_FF, seed=4),
        ffn_latent_down=Linear(prepared("q8_0", latent, N_EMBD, seed=7)),
        ffn_latent_up=Linear(prepared("q8_0", N_EMBD, latent, seed=8)),
    )
    x, residual = torch.randn(n_tokens, N_EMBD), torch.randn(n_tokens, N_EMBD)
    moe = MoeSpec(N_EXPERTS, 3, n_ff=N_FF, n_ff_shared=96, latent_dim=latent)
    want = moe_mlp(x.double(), unprepared(layer), moe)
    got = gpu_moe.moe_mlp(x, layer, moe, residual=residual)
    assert error(got - residual, want) < (5e-5 if n_tokens == 1 else 3e-3)


@pytest.mark.parametrize("name", ["q4_0", "f16"])
def test_experts_beyond_31_bits(name: str) -> None:
    layer = experts_of(name, name)
    assert layer.ffn_gate_exps is not None
    assert layer.ffn_up_exps is not None
    there = replace(
        layer,
        ffn_gate_exps=far(planes_of(layer.ffn_gate_exps)),
        ffn_up_exps=far(planes_of(layer.ffn_up_exps)),
        ffn_down_exps=far(planes_of(layer.ffn_down_exps)),
    )
    x, weights = torch.rand(1, N_EMBD), torch.rand(1, 2)
    experts = torch.tensor([[1, 3]], dtype=torch.int32)
    moe = MoeSpec(N_EXPERTS, 2, n_ff=N_FF)
    near = gpu_moe.expert_products(x, experts, weights, layer, moe)
    experts = experts + there.ffn_gate_exps.shape[0] - N_EXPERTS
    assert torch.equal(gpu_moe.expert_products(x, experts, weights, there, moe), near)


@pytest.mark.parametrize(
    ("n_tokens", "gated"),
    [
        (1, True),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_shared_expert_and_residual(gated: bool, n_tokens: int) -> None:
    layer = experts_of("q4_0", "q5_1", shared=True, gated=gated)
    x, residual = torch.rand(n_tokens, N_EMBD), torch.randn(n_tokens, N_EMBD)
    moe = MoeSpec(N_EXPERTS, 3, n_ff=N_FF, n_ff_shared=96, renormalise=False)
    want = moe_mlp(x.double(), unprepared(layer), moe)
    assert error(gpu_moe.moe_mlp(x, layer, moe), want) < 2e-3
    got = gpu_moe.moe_mlp(x, layer, moe, residual=residual)
    assert error(got - residual, want) < 2e-3
