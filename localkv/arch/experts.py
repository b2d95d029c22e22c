"""Routed experts as a file's keys describe them.

After llama.cpp's `src/llama-model.cpp` and `build_moe_ffn` in `src/llama-graph.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localkv.arch.facts import Facts
from localkv.arch.spec import Gating, LayerSpec, MlpSpec, MoeSpec
from localkv.errors import ModelFileError

GATINGS: dict[int, Gating] = {
    1: "softmax",
    2: "sigmoid",
    3: "softmax_of_chosen",
    4: "sqrt_softplus",
}
"""By the number in a file (llama.cpp's `llama_expert_gating_func_type`); 0 says nothing."""


def experts(
    facts: Facts,
    *,
    gating: Gating | None = "softmax",
    gating_varies: bool = False,
    renormalise: bool | None = True,
    scaled: bool = False,
    n_used: int = 0,
    n_ff: int = 0,
    **changes: Any,
) -> MoeSpec:
    """Routed experts.

    Args:
        gating: the architecture's, or None if the file must name one.
        gating_varies: the file may name another.
        renormalise: see `MoeSpec`; None if the file says it, and no otherwise.
        scaled: the architecture takes a factor on the weights.
        n_used: how many a token uses, if that is not the same in all layers.
        n_ff: width of an expert, if it is not the one in the keys.
        changes: other fields of `MoeSpec`.

    Raises:
        ModelFileError: values contradict each other, or a way to choose experts is not known.
    """
    n_experts = facts.integer("expert_count")
    n_used = n_used or facts.same_in_all_layers("expert_used_count")
    if not 0 < n_used <= n_experts:
        raise ModelFileError(f"{n_used} of {n_experts} experts can't be used")
    n_groups, n_groups_used = _groups(facts, n_experts, n_used)
    if renormalise is None:
        renormalise = facts.boolean("expert_weights_norm", False)
    return MoeSpec(
        n_experts,
        n_used,
        n_ff or expert_width(facts),
        renormalise=renormalise,
        gating=_gating(facts, gating, gating_varies),
        n_groups=n_groups,
        n_groups_used=n_groups_used,
        weights_scale=(facts.number("expert_weights_scale", 0.0) if scaled else 0.0) or 1.0,
        **changes,
    )


def expert_width(facts: Facts) -> int:
    """Hidden values of an expert, if not by a key of its own then by the dense blocks'."""
    width = facts.same_in_all_layers("expert_feed_forward_length", 0)
    return width or facts.same_in_all_layers("feed_forward_length")


def dense(facts: Facts) -> MlpSpec:
    """The dense block of a model whose other layers have experts."""
    return MlpSpec(facts.same_in_all_layers("feed_forward_length"))


def leading_dense(facts: Facts, *, step: int = 1) -> list[bool]:
    """Whether each layer is dense: all before `leading_dense_block_count`, and from there on all
    but the last of each `step`."""
    n_lead = facts.integer("leading_dense_block_count", 0)
    return [i < n_lead or (i + 1) % step != 0 for i in range(facts.n_layers)]


def with_dense(
    facts: Facts, layers: Sequence[LayerSpec], is_dense: Sequence[bool]
) -> list[LayerSpec]:
    """Layers of experts, but with a dense block where `is_dense` says so."""
    if not any(is_dense):
        return list(layers)
    block = dense(facts)
    return [
        replace(layer, ffn=block) if without_experts else layer
        for layer, without_experts in zip(layers, is_dense, strict=True)
    ]


def has_selection_bias(facts: Facts) -> bool:
    """Whether the file's layers have one; all with experts must have it then."""
    return any(name.endswith((".exp_probs_b.bias", ".exp_probs_b")) for name in facts.shapes)


def _gating(facts: Facts, default: Gating | None, varies: bool) -> Gating:
    key = "expert_gating_func"
    number = facts.integer(key) if default is None else facts.integer(key, 0)
    if number == 0 and default is not None:
        return default
    known = varies or default is None or GATINGS.get(number) == default
    if number not in GATINGS or not known:
        usual = ", ".join(f"{i} ({name})" for i, name in GATINGS.items())
        raise ModelFileError(
            f"expert gating function {number} is not supported in {facts.architecture!r}",
            hint=f"known are {usual}; this architecture has {default or 'any of them'}",
        )
    return GATINGS[number]


def _groups(facts: Facts, n_experts: int, n_used: int) -> tuple[int, int]:
    """How many groups there are and how many of them a token may use; 1 and 1 without groups."""
    n_groups = facts.integer("expert_group_count", 0)
    if n_groups <= 1:
        return 1, 1
    n_groups_used = facts.integer("expert_group_used_count", 0)
    if n_experts % n_groups or n_experts // n_groups < 2:
        raise ModelFileError(f"{n_experts} experts don't make {n_groups} groups of two or more")
    if not 1 <= n_groups_used <= n_groups:
        raise ModelFileError(f"{n_groups_used} of {n_groups} groups of experts can't be used")
    if n_used > n_groups_used * (n_experts // n_groups):
        raise ModelFileError(f"{n_groups_used} groups of experts have fewer than {n_used}")
    return n_groups, n_groups_used
