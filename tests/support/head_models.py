"""Small random models whose last block predicts a further token, one of each architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from support.expert_models import EXPERT_MODELS, GLM, ExpertModel
from support.hybrid_models import hybrid

_WITH_ONE_MORE = {
    "hy_v3": {},
    "step35": {
        "attention.sliding_window_pattern": [False, True, True, False, True],
        "swiglu_clamp_exp": [0.0, 0.0, 0.7, 0.5, 0.6],
        "swiglu_clamp_shexp": [0.0, 0.4, 0.0, 0.6, 0.3],
    },
    "mimo2": {"attention.sliding_window_pattern": [False, True, True, False, True]},
    "cohere2moe": {},
}
"""Keys with values for one block more."""


def _with_head(name: str) -> ExpertModel:
    """A model with one block more, which predicts; MiMo's is dense, and has one matrix for q, k and
    v, and sinks."""
    model, head = EXPERT_MODELS[name], EXPERT_MODELS[name].n_layers
    model = replace(
        model,
        n_layers=head + 1,
        keys={**model.keys, **_WITH_ONE_MORE[name], "nextn_predict_layers": 1},
        n_heads=(*model.n_heads, 3) if model.n_heads else (),
        predicts=True,
    )
    if name != "mimo2":
        return model
    return replace(model, dense=(*model.dense, head), sinks=(*model.sinks, head), joined=(head,))


HEAD_MODELS: dict[str, Callable[[Path], Path]] = {
    "glm4moe": GLM.write,
    **{name: _with_head(name).write for name in _WITH_ONE_MORE},
    **{
        name: hybrid(name, predicts=True).write
        for name in (
            *("qwen35", "qwen35moe", "qwen3next", "deepseek2", "bailingmoe3"),
            *("nemotron_h_moe", "nemotron_h_super"),
        )
    },
}
"""What writes each to a path."""
