"""Scales per layer and KV head, for the cache types that need them: their file, and its checks.

The file holds measurements, the largest magnitude of each head's K and V, so that one file
serves every type: a scale is absmax / the type's largest finite value. No torch.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from localkv.arch.spec import ModelSpec
from localkv.cache.layout import SegmentSpec, group_layouts
from localkv.cache.profile_file import KIND as PROFILE
from localkv.cache.profile_file import read_profile
from localkv.config import CacheConfig, KVScales
from localkv.errors import UsageError, printable
from localkv.formats import KV_FORMATS
from localkv.system.input_file import read_input
from localkv.system.whole_file import write_whole

KIND, VERSION = "localkv KV scales", 1
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""The normal numbers of float32."""

MOST_BYTES = 64 << 20
"""Of a file of scales; 1000 layers of 1000 heads take half of that."""

_COUNTS = ("n_layers", "n_kv_heads", "head_dim")
_ROTATIONS = ("rotation_k", "rotation_v")


def head_scales(absmax: Iterable[float], type_name: str) -> list[float]:
    """The scales of one layer's KV heads; 1 for a head without values other than 0."""
    largest = KV_FORMATS[type_name].largest
    return [value / largest if value / largest >= SMALLEST else 1.0 for value in absmax]


def wants_scales(types: Iterable[str]) -> list[str]:
    """Those of some cache types whose rows are scaled by head."""
    return [name for name in types if name in KV_FORMATS and KV_FORMATS[name].scales_by_head]


def require_scales(types: Iterable[str], given: bool) -> None:
    """Refuse a type without the scales that it wants, and scales that no type wants.

    Raises:
        UsageError: tells how scales are measured.
    """
    wanting = wants_scales(types)
    if wanting and not given:
        raise UsageError(
            f"cache type {wanting[0]} needs a file of scales (--kv-scales)",
            hint="localkv perplexity -m MODEL -f TEXT --calibrate-kv FILE makes one; "
            "--kv-profile has them, too, from localkv calibrate -m MODEL",
        )
    if given and not wanting:
        having = ", ".join(name for name, fmt in KV_FORMATS.items() if fmt.scales_by_head)
        raise UsageError("no cache type chosen uses scales (--kv-scales)", hint=f"those: {having}")


def check_scales(cache: CacheConfig, config: ModelSpec) -> None:
    """Refuse a cache whose types lack scales, or whose scales are not for this model, rotation and
    smoothing.

    Raises:
        UsageError: names the difference.
    """
    if not wants_scales(cache.types):
        return
    require_scales(cache.types, cache.kv_scales is not None)
    assert cache.kv_scales is not None
    require_alike(config)
    check_model(cache.kv_scales, config)
    _check_smoothing(cache.kv_scales, cache.smoothing)
    for layout in group_layouts(cache, config.groups):
        for spec in layout.segments:
            _check_rotation(cache.kv_scales, spec)


def require_alike(config: ModelSpec) -> None:
    """Refuse a model whose layers can't share a table of scales.

    Raises:
        UsageError: some have other heads than others, or no K and V of their own.
    """
    heads = {(group.n_kv_heads, group.key_dim, group.value_dim) for group in config.groups}
    if len(heads) > 1 or sum(len(group.layers) for group in config.groups) < config.n_layers:
        raise UsageError(
            "types that are scaled by head need a model whose layers all have K and V, of alike "
            "heads",
            hint="use fp8_e4m3_token or fp8_e5m2_token, which need no file of scales",
        )


def check_model(scales: KVScales, config: ModelSpec) -> None:
    """Refuse scales of a model of another shape.

    Raises:
        UsageError: names the difference.
    """
    group = config.groups[0]
    sizes = {
        "architecture": config.architecture,
        "n_layers": config.n_layers,
        "n_kv_heads": group.n_kv_heads,
        "head_dim": group.key_dim,
    }
    for name, ours in sizes.items():
        theirs = getattr(scales, name)
        if theirs != ours:
            theirs, ours = map(reprlib.repr, (theirs, ours))
            raise UsageError(
                f"the KV scales are of another model: its {name} is {theirs}, this one's {ours}",
                hint="measure them with this model (localkv perplexity --calibrate-kv FILE)",
            )


def _check_smoothing(scales: KVScales, smoothing: str) -> None:
    if scales.smoothing == smoothing:
        return
    if not smoothing:
        raise UsageError(
            "the KV scales were measured with smoothing, which is not in use",
            hint="name the file that they are from as --kv-profile",
        )
    measured = "with other smoothing than" if scales.smoothing else "without the smoothing of"
    raise UsageError(
        f"the KV scales were measured {measured} the KV profile",
        hint="leave out --kv-scales: the profile has scales of its own",
    )


def _check_rotation(scales: KVScales, spec: SegmentSpec) -> None:
    for side, type_name, ours, theirs in (
        ("K", spec.type_k, spec.rotation_k, scales.rotation_k),
        ("V", spec.type_v, spec.rotation_v, scales.rotation_v),
    ):
        if KV_FORMATS[type_name].scales_by_head and ours != theirs:
            was, wanted = (f"rotated by {n}" if n else "not rotated" for n in (theirs, ours))
            raise UsageError(
                f"the KV scales were measured with {side} {was}, but it is to be {wanted}",
                hint="measure and use them with the same --kv-rotation",
            )


def write_kv_scales(path: str | os.PathLike[str], scales: KVScales) -> None:
    """Write a file of scales.

    Raises:
        UsageError: it can't be written.
    """
    text = json.dumps({"kind": KIND, "version": VERSION, **asdict(scales)}, ensure_ascii=False)
    try:
        write_whole(path, (text + "\n").encode(errors="replace"))
    except OSError as error:
        raise UsageError(f"the KV scales {printable(path)}: {error.strerror}") from error


def read_kv_scales(path: str | os.PathLike[str]) -> KVScales:
    """Read a file of scales, or those of a KV profile.

    Raises:
        UsageError: it can't be read, or is not such a file, or holds an impossible value.
    """
    what = f"the KV scales {printable(path)}"
    try:
        data = json.loads(read_input(path, MOST_BYTES, what))
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what}: not a JSON file") from error
    if isinstance(data, dict) and data.get("kind") == PROFILE:
        scales = read_profile(path).scales()
        if scales is None:
            raise UsageError(f"{what}: the heads of its layers differ, so it has no scales")
        return scales
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(
            f"{what}: not a file of KV scales",
            hint="localkv perplexity -m MODEL -f TEXT --calibrate-kv FILE makes one",
        )
    if data.get("version") != VERSION:
        version = reprlib.repr(data.get("version"))
        raise UsageError(f"{what}: version {version} is not supported, {VERSION} is")
    for name in (*_COUNTS, *_ROTATIONS, "n_tokens"):
        if type(data.get(name)) is not int or data[name] < 0:
            raise UsageError(f"{what}: {name} is not a count")
    for name in ("architecture", "name", "smoothing"):
        if not isinstance(data.get(name, "" if name == "smoothing" else None), str):
            raise UsageError(f"{what}: {name} is not a text")
    return KVScales(
        **{name: data[name] for name in ("architecture", "name", *_COUNTS, *_ROTATIONS)},
        n_tokens=data["n_tokens"],
        absmax_k=_heads(data, "absmax_k", what),
        absmax_v=_heads(data, "absmax_v", what),
        smoothing=data.get("smoothing", ""),
    )


def _heads(data: dict[str, Any], name: str, what: str) -> tuple[tuple[float, ...], ...]:
    """The checked rows of one side: [n_layers][n_kv_heads]."""
    n_layers, n_kv_heads = data["n_layers"], data["n_kv_heads"]
    layers = data.get(name)
    if (
        not isinstance(layers, list)
        or len(layers) != n_layers
        or any(not isinstance(heads, list) or len(heads) != n_kv_heads for heads in layers)
    ):
        raise UsageError(
            f"{what}: {name} is not a table of {n_layers} layers x {n_kv_heads} KV heads"
        )
    for i, heads in enumerate(layers):
        for j, value in enumerate(heads):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= LARGEST:
                raise UsageError(
                    f"{what}: {name} of layer {i}, head {j} is {reprlib.repr(value)}, "
                    "not a finite number of 0 or more"
                )
    return tuple(tuple(float(value) for value in heads) for heads in layers)
