"""The layers that have a window, and how they rotate q and k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localkv.arch.facts import Facts
from localkv.arch.spec import LayerSpec, RopeSpec
from localkv.errors import ModelFileError

PATTERN = "attention.sliding_window_pattern"


def windows(
    facts: Facts, period: int | None, *, default: int = 0, dense_first: bool = False
) -> tuple[int, ...]:
    """How many of the latest positions each layer's tokens see; 0 is all.

    The pattern is an array with a switch for each layer, or a period P: the last layer of each P
    sees everything (llama.cpp's `set_swa_pattern`). Period 0 gives a window to every layer.

    Args:
        period: the architecture's, if the file has no pattern; None if it must have one.
        default: the window if the file has none; with 0, no layer has one then.
        dense_first: it is the first layer of each period that sees everything.

    Raises:
        ModelFileError: the pattern is of another length than the model, or missing.
    """
    window = facts.integer("attention.sliding_window", default)
    if not window:
        return (0,) * facts.n_layers
    if isinstance(facts.keys.get(facts.key(PATTERN)), list):
        has_window: Sequence[bool] = facts.flags_per_layer(PATTERN)
    else:
        every = facts.integer(PATTERN, *() if period is None else (period,))
        sees_all = 0 if dense_first else every - 1
        has_window = [not every or i % every != sees_all for i in range(facts.n_layers)]
    return tuple(window if has else 0 for has in has_window)


def window_rope(
    facts: Facts,
    rope: RopeSpec,
    *,
    theta: float | None = None,
    scaled: bool = True,
    most_dims: int = 0,
) -> RopeSpec:
    """RoPE of the layers with a window, by `rope.freq_base_swa`.

    Args:
        rope: RoPE of the layers that see everything.
        theta: the base if the file has no other; None for `rope`'s.
        scaled: positions are scaled as in `rope`; else not at all.
        most_dims: channels that may be rotated, if more than `rope` rotates.

    Raises:
        ModelFileError: a value makes no sense.
    """
    theta = facts.number("rope.freq_base_swa", rope.theta if theta is None else theta)
    n_dims = facts.integer("rope.dimension_count_swa", rope.n_dims)
    if n_dims > (most_dims or rope.n_dims) or n_dims % 2:
        raise ModelFileError(f"RoPE can't rotate {n_dims} channels of layers with a window")
    if scaled:
        return replace(rope, n_dims=n_dims, theta=theta)
    return RopeSpec(n_dims, theta, interleaved=rope.interleaved)


def with_window(layer: LayerSpec, window: int, rope: RopeSpec | None) -> LayerSpec:
    """A layer of attention with a window, and a RoPE of its own."""
    params = replace(layer.attention.params, window=window)
    return replace(layer, mixer=replace(layer.attention, params=params, rope=rope))


def layers_with_windows(
    layer: LayerSpec, windows: Sequence[int], rope: RopeSpec | None
) -> list[LayerSpec]:
    """The layer once for each of `windows`; where there is one, it rotates by `rope`."""
    kinds = {window: with_window(layer, window, rope) for window in set(windows) - {0}}
    kinds[0] = layer
    return [kinds[window] for window in windows]
