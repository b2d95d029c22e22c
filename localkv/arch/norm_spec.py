"""Norms of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NormSpec:
    """A norm of rows.

    Attributes:
        tensor: of a layer or of the model, whose `.weight` (and `.bias`, if it has one) it uses;
            empty for a norm without weights.
        kind: "rms" (Zhang & Sennrich 2019) or "layer" (Ba et al. 2016), which takes the mean off.
        eps: added to the mean square or the variance.
        span: of q and k, the values that are normed together and the weight's shape: each "head"
            by one weight [channels], each of the "heads" by its own [heads, channels], or the
            whole "row" of all heads by a weight [heads * channels].
    """

    tensor: str
    kind: Literal["rms", "layer"]
    eps: float
    span: Literal["head", "heads", "row"] = "head"
