"""Apertus: xIELU, with parameters of its own in each layer. After `src/models/apertus.cpp`."""

from __future__ import annotations

from dataclasses import replace

from localkv.arch import plain
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec, XieluParams
from localkv.errors import ModelFileError


def _xielu(facts: Facts) -> list[XieluParams]:
    """Each layer's parameters, from keys without the architecture's name.

    Raises:
        ModelFileError: a key is missing, or has values for another number of layers.
    """
    columns = []
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{name}"
        if isinstance(facts.keys.get(key), list):
            values = facts.keys.numbers(key)
        else:
            values = [facts.keys.number(key)] * facts.n_layers
        if len(values) != facts.n_layers:
            raise ModelFileError(f"key {key!r} has {len(values)} items for {facts.n_layers} layers")
        columns.append(values)
    return [XieluParams(*params) for params in zip(*columns, strict=True)]


def apertus(facts: Facts) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False, divisors=True, long_divisors=True)
    mlp = plain.mlp(facts, "xielu", gated=False)
    layer = plain.layer(facts, replace(attention, **plain.head_norms(facts)), mlp)
    return plain.model(
        facts, [replace(layer, ffn=replace(mlp, xielu=params)) for params in _xielu(facts)]
    )
