"""Architectures: a file per family turns a model file's facts into a `ModelSpec`.

Adding one is a function in a family's file and an entry in its `ARCHITECTURES`, or a new file and
its name in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable

from localkv.arch import (
    afmoe,
    apertus,
    cohere,
    deepseek,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    layer_normed,
    lfm2,
    llama,
    llama4,
    mamba,
    mixtures,
    olmo,
    phi,
    plamo,
    qwen,
    qwen35,
    smallthinker,
    uneven,
)
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec

FAMILIES = (
    llama,
    qwen,
    gemma,
    gemma4,
    cohere,
    phi,
    granite,
    olmo,
    glm,
    exaone,
    hunyuan,
    layer_normed,
    apertus,
    mixtures,
    gpt_oss,
    llama4,
    smallthinker,
    afmoe,
    plamo,
    uneven,
    deepseek,
    qwen35,
    lfm2,
    mamba,
)

ARCHS: dict[str, Callable[[Facts], ModelSpec]] = {
    name: spec for family in FAMILIES for name, spec in family.ARCHITECTURES.items()
}
"""What makes the specification of each architecture, by `general.architecture`."""
