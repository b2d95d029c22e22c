"""The experts that see a token, and their weights, against a loop over tokens in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localkv.arch.spec import MoeSpec
from localkv.kernels.moe import MIN_WEIGHT_SUM, route

GATINGS = ("softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus")


def shares_of(logits: list[float], gating: str) -> list[float]:
    if gating == "softmax":
        total = sum(math.exp(x) for x in logits)
        return [math.exp(x) / total for x in logits]
    if gating == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    if gating == "sqrt_softplus":
        return [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    return logits


def routed(logits: list[float], moe: MoeSpec, bias: list[float]) -> dict[int, float]:
    """Weights of a token's experts, by their ids, the best first."""
    shares = shares_of(logits, moe.gating)
    ranks = [share + b for share, b in zip(shares, bias, strict=True)]
    each = moe.n_experts // moe.n_groups
    rating = [
        sum(sorted(ranks[group * each : (group + 1) * each])[-2:]) for group in range(moe.n_groups)
    ]
    groups = sorted(range(moe.n_groups), key=lambda i: -rating[i])[: moe.n_groups_used]
    allowed = [i for i in range(moe.n_experts) if moe.n_groups == 1 or i // each in groups]
    chosen = sorted(allowed, key=lambda i: -ranks[i])[: moe.n_experts_used]
    weights = [shares[i] for i in chosen]
    if moe.gating == "softmax_of_chosen":
        weights = [math.exp(w) / sum(math.exp(other) for other in weights) for w in weights]
    if moe.renormalise:
        weights = [w / max(sum(weights), MIN_WEIGHT_SUM) for w in weights]
    return {i: w * moe.weights_scale for i, w in zip(chosen, weights, strict=True)}


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"renormalise": False, "weights_scale": 2.5},
        {"selection_bias": True},
        {"n_groups": 4, "n_groups_used": 2},
        {"selection_bias": True, "n_groups": 3, "n_groups_used": 1, "weights_scale": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("xp", [np, torch], ids=lambda xp: xp.__name__)
def test_routing(xp: Any, changes: dict[str, Any], gating: Any) -> None:
    rng = np.random.default_rng(1)
    moe = replace(MoeSpec(12, 3, n_ff=8, gating=gating), **changes)
    logits = rng.normal(size=(9, 12)) * 2
    bias = rng.normal(size=12) if moe.selection_bias else np.zeros(12)
    given = xp.asarray(bias) if moe.selection_bias else None
    experts, weights = route(xp.asarray(logits), moe, given)
    for i, row in enumerate(logits.tolist()):
        want = routed(row, moe, bias.tolist())
        assert experts[i].tolist() == list(want)
        assert weights[i].tolist() == pytest.approx(list(want.values()), rel=1e-12)


def test_softplus_of_large_logits() -> None:
    moe = MoeSpec(2, 2, n_ff=8, gating="sqrt_softplus", renormalise=False)
    weights = route(np.array([[900.0, -30.0]]), moe)[1]
    assert weights.tolist() == [pytest.approx([30.0, math.exp(-15.0)])]


def test_large_logits_are_told_apart() -> None:
    """Their sigmoids are 1 in float32."""
    moe = MoeSpec(4, 1, n_ff=8, gating="sigmoid", weighs_input=True)
    assert route(np.array([[30, 20, 40, 25]], np.float32), moe)[0].tolist() == [[2]]


def test_equal_shares_go_to_the_first() -> None:
    moe = MoeSpec(8, 2, n_ff=8, gating="sigmoid", n_groups=4, n_groups_used=2)
    experts, weights = route(np.zeros((1, 8), np.float32), moe)
    assert experts.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]
