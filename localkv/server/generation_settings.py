"""How a request's tokens are drawn, in llama-server's words."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from localkv.sampling.params import NUMBERS, SamplingParams

RANDOM_SEED = 0xFFFFFFFF
"""What stands for a seed that is drawn."""


def generation_settings(
    params: SamplingParams,
    *,
    max_tokens: int | None = None,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    never: Collection[int] = (),
    stream: bool = False,
    n_probs: int = 0,
    timings_per_token: bool = False,
    post_sampling_probs: bool = False,
) -> dict[str, Any]:
    """The object `generation_settings` of an answer, and `params` of others.

    Args:
        params: the samplers and their settings.
        max_tokens: most tokens; None sets no limit, which is -1.
        seed: the one that was drawn, if the request left it open.
        stop: strings that end the text.
        never: tokens that are not drawn because of `ignore_eos`.
    """
    known = params.seed if params.seed is not None and params.seed >= 0 else seed
    bias = {**params.logit_bias, **(dict.fromkeys(never, float("-inf")) if ignore_eos else {})}
    most = -1 if max_tokens is None else max_tokens
    numbers = {
        number.aliases[0] if number.aliases else name: getattr(params, name)
        for name, number in NUMBERS.items()
    }
    numbers["seed"] = RANDOM_SEED if known is None else known
    min_keep = numbers.pop("min_keep")
    return {
        **numbers,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "mirostat": 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "stop": list(stop),
        "max_tokens": most,
        "n_predict": most,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": ignore_eos,
        "stream": stream,
        "logit_bias": [
            {"token": token, "bias": None if amount == float("-inf") else amount}
            for token, amount in bias.items()
        ],
        "n_probs": n_probs,
        "min_keep": min_keep,
        "samplers": list(params.samplers),
        "timings_per_token": timings_per_token,
        "post_sampling_probs": post_sampling_probs,
        "lora": [],
    }
