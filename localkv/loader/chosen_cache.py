"""The cache that a model is given: the types and scales that were asked for, or a profile's.

A model's profile is beside its file, or in the user's data folder. `kv_risks` says, from the file
and without torch, which models are known to suffer from packed K or V, and why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from localkv.arch.spec import AttentionSpec, ModelSpec
from localkv.cache.cache_checks import check_cache, unused_type
from localkv.cache.layout import group_layouts, pairs_of
from localkv.cache.profile import (
    KVProfile,
    TypeList,
    check_scales,
    profiled,
    read_kv_scales,
    read_profile,
    require_scales,
)
from localkv.config import CacheConfig, KVScales
from localkv.errors import UsageError, printable
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.model_fingerprint import measured_hash, model_hash
from localkv.loader.model_header import ModelHeader
from localkv.loader.smoothing import Smoothing
from localkv.quant_formats import KV_FORMATS

SUFFIX = ".kv.json"
AUTO = "auto"


def beside(model: str | os.PathLike[str]) -> Path:
    """The name of a profile beside a model's file: MODEL.kv.json for MODEL.gguf."""
    return Path(model).with_suffix(SUFFIX)


def in_data_folder(digest: str) -> Path:
    """The name of a profile in the platform's data folder (~/.local/share/localkv on Linux)."""
    from platformdirs import user_data_path

    return user_data_path("localkv", appauthor=False) / "profiles" / f"{digest}{SUFFIX}"


def find_profile(gguf: GGUFFile) -> Path | None:
    """The file of a model's profile, if there is one."""
    digest = measured_hash(gguf)
    found = [beside(gguf.path), in_data_folder(digest)]
    if digest != model_hash(gguf):  # the one beside it is measured without options
        found.reverse()
    return next((path for path in found if path.is_file()), None)


def model_profile(gguf: GGUFFile, name: str | os.PathLike[str]) -> KVProfile:
    """The profile of a model.

    Args:
        name: a file, or "auto", which looks for one.

    Raises:
        UsageError: there is none, or it is damaged, or of another model.
    """
    path = find_profile(gguf) if name == AUTO else Path(name)
    if path is None:
        raise UsageError(
            f"there is no KV profile of {printable(gguf.path.name)}, neither beside it nor in "
            f"{printable(in_data_folder('').parent)}",
            hint="localkv calibrate -m MODEL measures one, in some minutes",
        )
    profile = read_profile(path)
    wanted = measured_hash(gguf)
    if profile.model == model_hash(gguf) != wanted:
        raise UsageError(
            f"the KV profile {printable(path)} was measured without the options that replace what "
            "the model's file says",
            hint="localkv calibrate takes --rope-scale, --override-kv and others, too",
        )
    if profile.model != wanted:
        raise UsageError(
            f"the KV profile {printable(path)} is of another model, "
            f"{printable(profile.name)} ({printable(profile.architecture)}), or measured with "
            "other options that replace what its file says",
            hint="localkv calibrate -m MODEL measures this one, with its options",
        )
    return profile


def profile_path(model: str | os.PathLike[str]) -> Path | None:
    """The file of the profile of a model's file, if there is one."""
    return find_profile(open_gguf(model))


LARGE_BIAS = 16.0
"""Beyond it a step of 4 bits, an eighth of a block's largest value, is as large as what K's other
channels usually hold: a few units."""

_FLOATS = {"f32": np.float32, "f16": np.float16}
_K_BIAS = re.compile(r"blk\.(\d+)\.attn_(k|qkv)\.bias")


@dataclass(frozen=True)
class KVRisk:
    """Why a model does not bear every cache type.

    Attributes:
        reason: one line, with a safe choice.
        concerns: whether it applies to these types of K and V.
    """

    reason: str
    concerns: Callable[[str, str], bool]


def kv_risks(model: ModelHeader, config: ModelSpec | None = None) -> list[KVRisk]:
    """The known risks of a model; large biases show only in the file itself.

    Args:
        config: the model's; without it biases of q, k and v in one tensor are not looked at.

    Sources: llama.cpp #21385 (norms of Qwen2.5's K biases of 605 and 921), KVTuner (Qwen2.5-7B with
    4-bit K and V: GSM8K 0.8 %), vLLM #11906 (fp8 without scales), ollama #11929 (gpt-oss-20b at
    q8_0/q8_0: same most likely token for 74.9 %).
    """
    risks = []
    if biases := _large_biases(model, config):
        risks.append(
            KVRisk(
                f"{biases}: K in fewer bits than q8_0 loses the differences between tokens; "
                "use -ctk q8_0 or f16",
                lambda type_k, _: _bits(type_k) < _bits("q8_0"),
            )
        )
    if any(".attn_sinks." in name for name in model.tensors):
        risks.append(
            KVRisk(
                "this model has attention sinks, and is sensitive to any packed cache "
                "(gpt-oss keeps its most likely token for 75 % at q8_0/q8_0); use f16",
                lambda *types: min(map(_bits, types)) < _bits("f16"),
            )
        )
    return risks


def _bits(type_name: str) -> float:
    """Bits per value, without a scale per row."""
    fmt = KV_FORMATS[type_name]
    return 8 * fmt.block_bytes / fmt.block_size


def _large_biases(model: ModelHeader, config: ModelSpec | None) -> str:
    """A description of K's biases, if they may be large; else empty."""
    named = [
        (m, tensor) for name, tensor in model.tensors.items() if (m := _K_BIAS.fullmatch(name))
    ]
    found = [
        (int(m[1]), tensor, _k_part(m[2], int(m[1]), config))
        for m, tensor in named
        if m[2] == "k" or (config is not None and _attends(config, int(m[1])))
    ]
    if not found:
        return ""
    if not isinstance(model, GGUFFile):
        return "K has biases, which can be very large (they are in Qwen2.5)"
    largest, layer = max((_absmax(model, tensor, part), at) for at, tensor, part in found)
    return f"K has biases up to {largest:.3g} (layer {layer})" if largest > LARGE_BIAS else ""


def _attends(config: ModelSpec, layer: int) -> bool:
    return layer < config.n_layers and isinstance(config.layers[layer].mixer, AttentionSpec)


def _k_part(tensor: str, layer: int, config: ModelSpec | None) -> slice:
    """Where K's bias is: a layer's tensor of its own, or a part of the one for q, k and v."""
    if tensor == "k" or config is None:
        return slice(None)
    spec = config.layers[layer].attention
    n_q, n_k = spec.n_heads * spec.key_dim, spec.n_kv_heads * spec.key_dim
    return slice(n_q, n_q + n_k)


def _absmax(model: GGUFFile, tensor: TensorInfo, part: slice) -> float:
    """The largest magnitude in a part of a bias; 0 for types that biases don't have."""
    data = model.data(tensor.name).tobytes()
    if tensor.format.name == "bf16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif dtype := _FLOATS.get(tensor.format.name):
        values = np.frombuffer(data, dtype).astype(np.float32)
    else:
        return 0.0
    return float(np.abs(values[part]).max(initial=0.0))


@dataclass(frozen=True)
class ChosenCache:
    """What a model's cache is.

    Attributes:
        cache: with types by layer, scales and codebooks where there are some.
        types: the types by layer that come from a profile; None where others are named.
        smoothing: what the weights are changed by; None if by nothing.
        warnings: one line each for the user.
    """

    cache: CacheConfig
    types: TypeList | None
    smoothing: Smoothing | None
    warnings: list[str]


def chosen_cache(
    gguf: GGUFFile,
    config: ModelSpec,
    cache: CacheConfig,
    *,
    profile: str | os.PathLike[str] | KVProfile | None = None,
    bits: float | None = None,
    scales: str | os.PathLike[str] | KVScales | None = None,
    names_types: bool = True,
    n_batch: int = 512,
) -> ChosenCache:
    """A cache with what its profile and its scales have for it, checked against the model.

    Args:
        cache: as it was asked for.
        profile: a profile, its file, or "auto".
        bits: per value, that types by layer may take; None is the usual number.
        scales: of types that are scaled by head, or their file; None takes the profile's.
        names_types: the cache's types were chosen, so the profile gives no others.
        n_batch: most tokens of a batch.

    Raises:
        UsageError: a file can't be read, or the model can't be kept in these types.
    """
    if profile is not None and not isinstance(profile, KVProfile):
        profile = model_profile(gguf, profile)
    found = profiled(
        cache, profile, bits, names_types=names_types, groups=config.groups, n_batch=n_batch
    )
    smoothing = Smoothing.in_use(found.cache, profile)
    check_cache(found.cache, config.groups)
    scales = found.scales if scales is None else scales
    require_scales(found.cache.types, scales is not None)
    if scales is not None and not isinstance(scales, KVScales):
        scales = read_kv_scales(scales)
    cache = replace(found.cache, kv_scales=scales)
    group_layouts(cache, config.groups)  # refuses types that don't fit
    check_scales(cache, config)
    warnings = list(found.warnings)
    if useless := unused_type(cache, config.groups):
        warnings.append(useless)
    pairs = pairs_of(cache, config.groups)
    warnings += [
        risk.reason
        for risk in kv_risks(gguf, config)
        if any(risk.concerns(*types) for types in pairs)
    ]
    return ChosenCache(cache, found.types, smoothing, warnings)
