"""The effect of `--preset` on `-ctk` and `-ctv`, and the line that says so. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from localkv.cli.output.messages import say
from localkv.cli.parsing.nearness import distance
from localkv.presets import PRESETS

SIDES = {"cache_type_k": "-ctk", "cache_type_v": "-ctv"}
"""Parameter -> the flag that a preset stands for."""


def preset_or_given(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """The callback of `-ctk` and `-ctv`: the preset's type, unless one is named as near or nearer.

    A preset on the command line so wins over a type in the configuration file, and a type on the
    command line over every preset. `--preset` is eager, so it is known by now.
    """
    name = ctx.params.get("preset")
    assert param.name is not None
    if name is None or distance(ctx, param.name) <= distance(ctx, "preset"):
        return value
    preset = PRESETS[name]
    return preset.type_k if param.name == "cache_type_k" else preset.type_v


def preset_line(values: Mapping[str, Any], *, why: bool = False) -> str | None:
    """A preset as the flags it means: "preset speed: -ctk q8_0 -ctv q4_0"; None without one.

    A side on which another type was given is named with that type. If none was, `why` adds the
    preset's reason.
    """
    name = values["preset"]
    if name is None:
        return None
    wanted = {"cache_type_k": PRESETS[name].type_k, "cache_type_v": PRESETS[name].type_v}
    kept = [f"{SIDES[side]} {wanted[side]}" for side in SIDES if values[side] == wanted[side]]
    given = [f"{SIDES[side]} {values[side]}" for side in SIDES if values[side] != wanted[side]]
    line = f"preset {name}: {' '.join(kept) or 'nothing'}"
    if given:
        return f"{line} (given: {' '.join(given)})"
    return f"{line}; {PRESETS[name].reason}" if why else line


def say_preset(values: Mapping[str, Any], *, why: bool = False) -> None:
    """Print on stderr the flags of the preset, if there is one, as `preset_line` words them."""
    if line := preset_line(values, why=why):
        say(line)
