"""The options that use a KV profile: types by layer, and scales. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cli.options import option
from localkv.cli.parsing.completion import file_values
from localkv.cli.parsing.option_types import FILE
from localkv.errors import ModelFileError, UsageError
from localkv.formats import KV_FORMATS
from localkv.presets import PRESETS

if TYPE_CHECKING:
    from localkv.cache.profile import KVProfile

_PROFILED_TYPES = {"cache_type_k": "type_k", "cache_type_v": "type_v"}
_WINDOW_TYPES = ("cache_type_k_swa", "cache_type_v_swa")


def profile_option() -> click.Parameter:
    """`--kv-profile`."""
    return option(
        "--kv-profile",
        panel="KV cache",
        metavar="FILE",
        type=FILE,
        shell_complete=file_values,
        help="The types of K and V for each layer, from a file that localkv calibrate wrote for "
        "this model; auto looks for it beside the model (MODEL.kv.json) and in the data folder. "
        "-ctk and -ctv win over its types, --preset says how many bits it may take, and its own "
        "pair wins where it diverges less.",
    )


def bits_option() -> click.Parameter:
    """`--kv-bits`."""
    return option(
        "--kv-bits",
        panel="KV cache",
        type=click.FloatRange(0, min_open=True),
        metavar="N",
        help="Bits per value, on average, that the types of --kv-profile may take in the context, "
        "their tail and sink included. [default: 5]",
    )


def profile_arguments(values: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """The arguments of `LLM` that take a profile's place for types; none if there is no profile.

    A preset takes the types of a profile with at most its bits, if a profile is found and they
    diverge less than the preset's own pair, as far as that was measured.

    Raises:
        UsageError: two options say the same thing.
    """
    name, bits, preset = values["kv_profile"], values["kv_bits"], values["preset"]
    given = _given_types(values)
    if bits is not None and (given or preset is not None):
        other = "--preset" if preset is not None else "-ctk and -ctv"
        raise UsageError(
            f"--kv-bits and {other} both choose the types", hint="leave out one of them"
        )
    if given:
        return {} if name is None else {"kv_profile": name}
    if preset is not None:
        bits = preset_bits(preset)
        if name is None:
            usable = bits < _F16 and not values["kv_k_before_rope"]
            name = _found(model) if usable else None
        if name is None:
            return {}
        if (profile := _read(name, model)) is not None and _takes_own(profile, preset, bits):
            return {"kv_profile": str(name)} if profile.smoothing_name else {}
    if name is None and bits is None:
        return {}
    types = dict.fromkeys(_PROFILED_TYPES)
    return {**types, "kv_profile": str(name or "auto"), "kv_bits": bits}


_F16 = 16.0


def preset_bits(name: str) -> float:
    """Bits per value of a preset's pair, on average."""
    preset = PRESETS[name]
    formats = [KV_FORMATS[one] for one in (preset.type_k, preset.type_v)]
    return sum(8 * fmt.block_bytes / fmt.block_size for fmt in formats) / 2


def _found(model: Path) -> Path | None:
    """The profile of a model, if it has one; what is wrong with a model is said when it loads."""
    from localkv.loader.found_profile import profile_path

    try:
        return profile_path(model)
    except ModelFileError:
        return None


def _read(name: str | Path, model: Path) -> KVProfile | None:
    """A profile; None if "auto" finds none, which is said when the model loads."""
    from localkv.cache.profile_file import read_profile
    from localkv.loader.found_profile import AUTO

    path = _found(model) if name == AUTO else Path(name)
    return None if path is None else read_profile(path)


def _takes_own(profile: KVProfile, preset: str, bits: float) -> bool:
    """Whether a preset has its own pair: there are no types by layer of at most its bits in every
    context, or they were measured to diverge no less."""
    fitting = [one.verified for one in profile.without_tail if one.bits <= bits]
    own = profile.pairs.get(f"{PRESETS[preset].type_k}/{PRESETS[preset].type_v}")
    return not fitting or (own is not None and own <= min(fitting))


def _given_types(values: Mapping[str, Any]) -> bool:
    """Whether types are named, by other options than a preset."""
    if any(values[name] is not None for name in _WINDOW_TYPES):
        return True
    if (preset := values["preset"]) is not None:
        return any(values[name] != getattr(PRESETS[preset], of) for name, of in _PROFILED_TYPES.items())
    ctx = click.get_current_context()
    return any(ctx.get_parameter_source(name) != ParameterSource.DEFAULT for name in _PROFILED_TYPES)
