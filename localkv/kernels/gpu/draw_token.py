"""The next token, drawn on the device, so that no logits are copied to the host.

For the samplers that need nothing but the logits of this token; others are the host's
(`localkv.sampling`). Plain torch, and the order of the default chain: top_k, top_p, min_p,
temperature.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from localkv.config import SamplingParams

ON_DEVICE = ("top_k", "top_p", "min_p", "temperature")
"""Samplers that `draw` has, in its order."""


def can_draw(params: SamplingParams) -> bool:
    """Whether `draw` does what the sampler chain of `params` does.

    It does where the chain consists of samplers that are off and of those in `ON_DEVICE`, in their
    order and with a temperature above 0 at the end.
    """
    off = {
        "penalties": params.repeat_penalty == 1
        and params.frequency_penalty == params.presence_penalty == 0,
        "dry": params.dry_multiplier == 0,
        "top_n_sigma": params.top_n_sigma <= 0,
        "typ_p": params.typ_p == 1,
        "xtc": params.xtc_probability == 0 or params.xtc_threshold > 0.5,
    }
    chain = [name for name in params.samplers if not off.get(name, False)]
    return (
        not params.logit_bias
        and params.min_keep <= 1
        and params.dynatemp_range <= 0
        and params.temperature > 0
        and chain == list(ON_DEVICE)
    )


def greedy(logits: Tensor) -> Tensor:
    """The largest logit's token, the lowest of equal ones: [rows, n_vocab] -> int64 [rows]."""
    return logits.argmax(-1)


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """A token for each row, by its probability after the samplers of `params`.

    The largest of `p / e`, e from an exponential distribution, is token i with probability p_i
    (Gumbel 1954, in another form), so that nothing is searched and the host needn't know anything.

    Args:
        logits: float32 [rows, n_vocab].
        params: which `can_draw`.
        generator: of the device of `logits`.

    Returns:
        int64 [rows].
    """
    n_vocab = logits.shape[-1]
    k = min(params.top_k, n_vocab) if params.top_k > 0 else n_vocab
    values, ids = logits.topk(k)
    if params.top_p < 1:
        p = values.softmax(-1)
        below = p.cumsum(-1) - p
        keep = below < params.top_p
        keep[:, 0] = True
        values = values.masked_fill(~keep, -torch.inf)
    if params.min_p > 0:
        least = values[:, :1] + math.log(params.min_p)
        values = values.masked_fill(values < least, -torch.inf)
    p = (values / params.temperature).softmax(-1)
    e = torch.empty_like(p).exponential_(generator=generator)
    return ids.gather(-1, (p / e).argmax(-1, keepdim=True)).squeeze(-1)
