"""The options that say how a model is loaded, what cache it gets, and what drafts for it.

Each group is declared by a function and read by another, which returns the arguments of `LLM` that
the values stand for. The groups are the cache's types, windows and exact rows; a cache with a
budget; a profile of types by layer; the CPUs for threads; speculative decoding.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from localkv.cache.ladder import DEFAULT_LADDER, Pair, ladder_text, parse_ladder
from localkv.commands.completion import file_values
from localkv.commands.options import (
    KV_CACHE,
    MODEL,
    Panel,
    compute_options,
    context_option,
    model_options,
    override_kv_option,
    override_pre_option,
    preset_option,
    preset_or_given,
)
from localkv.commands.parsing import FILE, Choice, Option, Whole, byte_size_of
from localkv.config import (
    ACTIVATIONS,
    FIT,
    KV_ROTATIONS,
    MOST_EXACT,
    PRESETS,
    ROPE_SCALINGS,
    CacheConfig,
    Overrides,
    RopeOptions,
)
from localkv.engine.speculation.config import DRAFTERS, MOST_DRAFTED, Speculation, check_drafter
from localkv.errors import ModelFileError, UsageError, quoted
from localkv.quant_formats import FORMER_NAMES, KV_FORMATS, WHY_RENAMED
from localkv.system.processor import cpus_of_mask, cpus_of_range
from localkv.system.threads import check_cpus

if TYPE_CHECKING:
    from localkv.cache.profile import KVProfile

_SPEED = Panel("Speed")
_CONTEXTS = Panel("Longer contexts")
_CACHE_TYPE = Choice(tuple(KV_FORMATS), False, FORMER_NAMES, WHY_RENAMED)


def _cache_type_option(side: str, short: str) -> Option:
    return KV_CACHE.option(
        f"{short} --cache-type-{side.lower()}",
        llama_env=f"CACHE_TYPE_{side}",
        type=_CACHE_TYPE,
        default="f16",
        metavar="TYPE",
        callback=preset_or_given,
        help=f"The type of K in the cache: {', '.join(KV_FORMATS)}."
        if side == "K"
        else "The type of V, one of the same.",
    )


def window_options() -> list[click.Parameter]:
    """The options about rows that are kept as f16, about layers that see a window only, about
    latents, and about states; `window_arguments` reads them."""

    def types(side: str, short: str, help_text: str) -> Option:
        return KV_CACHE.option(
            f"{short} --cache-type-{side.lower()}-swa",
            type=_CACHE_TYPE,
            metavar="TYPE",
            help=help_text,
        )

    def exact(name: str, help_text: str) -> Option:
        return KV_CACHE.option(f"--kv-{name}", type=Whole(0, MOST_EXACT), help=help_text)

    return [
        exact(
            "tail",
            "Each token reads the newest N tokens as f16, and only those before them packed. "
            "[default: 64 for types that pack several tokens together, else 0]",
        ),
        exact(
            "sink",
            "Keep the first N tokens as f16. [default: 4 for types of less than 4 bits per value, "
            "and for those with scales by channel of at most 5; else 0]",
        ),
        types("K", "-ctk-swa", "The type of K in layers with a window. [default: as -ctk]"),
        types("V", "-ctv-swa", "The type of V in layers with a window. [default: as -ctv]"),
        KV_CACHE.flag(
            "--swa-full",
            llama_env="SWA_FULL",
            help="Keep all rows of layers with a window, not only those that later tokens see: "
            "more memory, and any prompt is reused as far as it is the same.",
        ),
        KV_CACHE.option(
            "-ctk-rope --cache-type-k-rope",
            type=_CACHE_TYPE,
            metavar="TYPE",
            default=CacheConfig.type_k_rope,
            help="The type of the rotated parts of keys in models that keep latents (DeepSeek); "
            "-ctk is the type of the latents, and V is a view of them.",
            show_default=False,
        ),
        KV_CACHE.option(
            "-ctxcp --ctx-checkpoints",
            llama_env="CTX_CHECKPOINTS",
            type=Whole(0),
            default=CacheConfig.ctx_checkpoints,
            help="Copies of the states of recurrent layers that are kept at most, to go on from "
            "where a prompt begins like the last one.",
        ),
        KV_CACHE.option(
            "-cms --checkpoint-min-step",
            llama_env="CHECKPOINT_MIN_SPACING_NT",
            type=Whole(1),
            default=CacheConfig.checkpoint_min_step,
            help="Tokens between two such copies within a text.",
        ),
    ]


def asked_types(values: Mapping[str, Any]) -> list[str]:
    """The cache types that are asked for."""
    names = (f"cache_type_{side}{group}" for group in ("", "_swa") for side in "kv")
    return [values[name] for name in names if values[name] is not None]


_WINDOW = (
    *("cache_type_k_swa", "cache_type_v_swa", "swa_full", "cache_type_k_rope"),
    *("ctx_checkpoints", "checkpoint_min_step", "kv_tail", "kv_sink"),
)
_AS_NAMED = (
    *("n_ctx", "cache_type_k", "cache_type_v", "kv_rotation", "kv_scales", "device"),
    *("override_pre", "override_kv", "fit", "mlock", "use_mmap", "activations"),
)
"""Options that `LLM` takes by their own names."""


def window_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the values of `window_options` stand for."""
    return {name: values[name] for name in _WINDOW}


def window_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `CacheConfig` that the values of `window_options` stand for."""
    return {name.removeprefix("cache_"): values[name] for name in _WINDOW}


def loading_options(
    n_ctx: int | None = None, *, default_threads: str = "one per core"
) -> list[click.Parameter]:
    """The options that say how a model is loaded; `loading_arguments` reads them.

    Args:
        n_ctx: the context where the user names none; None is `LLM`'s choice.
        default_threads: how many threads there are where the user names no number.
    """
    return [
        *model_options(),
        context_option(n_ctx),
        _cache_type_option("K", "-ctk"),
        _cache_type_option("V", "-ctv"),
        preset_option(),
        *window_options(),
        KV_CACHE.option(
            "--kv-rotation",
            type=Choice(KV_ROTATIONS, case_sensitive=False),
            default="auto",
            metavar="WHEN",
            help="Rotate K and V before they are packed, which spreads outliers over a block: "
            f"{', '.join(KV_ROTATIONS)}. auto does so for types with blocks "
            f"({', '.join(name for name, fmt in KV_FORMATS.items() if fmt.shares_scale)}) if the "
            "head size is a multiple of 64, as llama.cpp does.",
        ),
        KV_CACHE.flag(
            "--kv-k-before-rope",
            help="Keep K as it is before RoPE, and rotate it whenever it is read, as KVQuant does: "
            "to compare, with --device reference only.",
        ),
        KV_CACHE.option(
            "--kv-scales",
            metavar="FILE",
            help="The scales of types that are scaled by head ("
            f"{', '.join(name for name, fmt in KV_FORMATS.items() if fmt.scales_by_head)}"
            "), in a file that localkv perplexity --calibrate-kv wrote.",
        ),
        profile_option(),
        bits_option(),
        *ladder_options(),
        *compute_options(default_threads),
        *placement_options(),
        *offload_options(),
        activations_option(),
        MODEL.option(
            "-fit --fit",
            llama_env="FIT",
            type=Choice(FIT, case_sensitive=False),
            default="on",
            metavar="WHEN",
            help="on: leave on the CPU what a GPU has no room for, and refuse a model that does "
            "not fit in memory, before anything is allocated. off: try it.",
        ),
        MODEL.flag(
            "--mlock",
            llama_env="MLOCK",
            help="Keep the weights in memory, so that the system never has to read them again.",
        ),
        MODEL.option(
            "use_mmap --mmap/--no-mmap",
            llama_env="MMAP",
            type=bool,
            default=True,
            help="Map the model's file, or read it into memory.  [default: mmap]",
        ),
        *adapter_options(),
        *override_options(),
    ]


def override_options() -> list[click.Parameter]:
    """What replaces what a model's file says; `Overrides.of` reads them."""
    return [*rope_options(), override_pre_option(), override_kv_option()]


OVERRIDES = (*(one.name for one in fields(RopeOptions)), "override_pre", "override_kv")
"""The names of the parameters that `override_options` declares."""


def adapter_options() -> list[click.Parameter]:
    """LoRA adapters; `adapter_arguments` reads them."""
    return [
        MODEL.option(
            "--lora",
            multiple=True,
            metavar="FILES",
            shell_complete=file_values,
            help="Apply a LoRA adapter, a GGUF file. Separate several with commas, or give the "
            "option again. Requests name adapters by number: 0 is the first one of --lora, "
            "and --lora-scaled goes on counting. On a CPU only.",
        ),
        MODEL.option(
            "--lora-scaled",
            multiple=True,
            metavar="FILE:SCALE",
            help="Apply a LoRA adapter with a scale other than 1, such as story.gguf:0.5.",
        ),
        MODEL.flag(
            "--lora-init-without-apply",
            help="Load adapters with the scale 0: requests, or POST /lora-adapters, apply them.",
        ),
    ]


def adapter_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that these options stand for; none without an adapter.

    Raises:
        UsageError: a file has no scale or is named twice, or there is none.
    """
    given = [(name, 1.0) for text in values["lora"] for name in text.split(",")]
    for item in (item for text in values["lora_scaled"] for item in text.split(",")):
        name, colon, text = item.rpartition(":")
        try:
            given.append((name if colon else "", float(text)))
        except ValueError:
            given.append(("", 0.0))
        if not given[-1][0]:
            raise UsageError(
                f"--lora-scaled {item}: there is no scale after a colon",
                hint="write FILE:SCALE, such as story.gguf:0.5",
            )
    if not given:
        if values["lora_init_without_apply"]:
            raise UsageError(
                "--lora-init-without-apply has no effect without --lora or --lora-scaled",
                hint="name an adapter, or leave it out",
            )
        return {}
    names = [name for name, _ in given]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"the adapter {twice!r} is named twice", hint="name each file once")
    if values["lora_init_without_apply"]:
        given = [(name, 0.0) for name in names]
    return {"lora": dict(given)}


def rope_options() -> list[click.Parameter]:
    """RoPE instead of what the file says: the fields of `RopeOptions`."""

    def number(name: str, llama_env: str, help_text: str) -> Option:
        return _CONTEXTS.option(
            f"--{name}", llama_env=llama_env, type=float, metavar="N", help=help_text
        )

    return [
        _CONTEXTS.option(
            "--rope-scaling",
            llama_env="ROPE_SCALING_TYPE",
            type=Choice(ROPE_SCALINGS, case_sensitive=False),
            metavar="HOW",
            help="How RoPE's positions are scaled: none, linear, or yarn. [default: as the file "
            "says, else linear]",
        ),
        number(
            "rope-scale",
            "ROPE_SCALE",
            "Scale RoPE for a context N times as long. [default: as the file says]",
        ),
        number(
            "rope-freq-base",
            "ROPE_FREQ_BASE",
            "The base of RoPE's frequencies. [default: as the file says]",
        ),
        number(
            "rope-freq-scale",
            "ROPE_FREQ_SCALE",
            "The inverse of --rope-scale: 0.25 is --rope-scale 4.",
        ),
        _CONTEXTS.option(
            "--yarn-orig-ctx",
            llama_env="YARN_ORIG_CTX",
            type=Whole(0),
            help="YaRN: the model's context before it is scaled. [default: as the file says, else "
            "what it was trained with]",
        ),
        number(
            "yarn-ext-factor",
            "YARN_EXT_FACTOR",
            "YaRN: how much of the frequencies that turn often is kept; 0 scales all alike. "
            "[default: as the file says, else 1 with yarn]",
        ),
        number(
            "yarn-attn-factor",
            "YARN_ATTN_FACTOR",
            "A factor on cos and sin where nothing is kept (--yarn-ext-factor 0). [default: as the "
            "file says, else 1]",
        ),
        number(
            "yarn-beta-slow",
            "YARN_BETA_SLOW",
            "YaRN: frequencies with fewer turns in the original context are scaled. [default: as "
            "the file says, else 1]",
        ),
        number(
            "yarn-beta-fast",
            "YARN_BETA_FAST",
            "YaRN: frequencies with more turns in the original context are kept. [default: as the "
            "file says, else 32]",
        ),
    ]


def override_flags(values: Mapping[str, Any]) -> list[str]:
    """The words of a command line that give `override_options` these values."""
    given = {name: values[name] for name in OVERRIDES if values[name] is not None}
    overrides = given.pop("override_kv", {})
    flags = [f"--{name.replace('_', '-')} {value}".split(" ", 1) for name, value in given.items()]
    rows = [["--override-kv", _written(key, value)] for key, value in overrides.items()]
    return [word for pair in (*flags, *rows) for word in pair]


_TYPES = {str: "str", bool: "bool", int: "int", float: "float"}


def _written(key: str, value: str | int | float | bool) -> str:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    item = f"{key}={_TYPES[type(value)]}:{shown}"
    return '"{}"'.format(item.replace('"', '""')) if "," in item or item[0] == '"' else item


def activations_option() -> Option:
    """`--activations`."""
    return MODEL.option(
        "--activations",
        type=Choice(ACTIVATIONS, case_sensitive=False),
        default="auto",
        metavar="HOW",
        help="exact: multiply float32 by float32, to measure what else costs something. Weights "
        "whose products would round activations are decoded when they are loaded: four bytes a "
        "value, and slower. auto: what is fastest; most CPUs then round activations to 8 bits "
        "beside packed weights.",
    )


def unoffered_values(offered: Collection[str]) -> dict[str, Any]:
    """The values that options of `loading_options` have in a command that does not offer them.

    Args:
        offered: names of the parameters that it has.
    """
    params = [param for param in loading_options() if param.name not in offered]
    for param in params:
        param.envvar = None
    return click.Command("", params=params).make_context("", []).params


def given_threads(n: int | None) -> int | None:
    """A number of threads, unless it stands for the default."""
    return n if n and n > 0 else None


def loading_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the values of `loading_options` stand for.

    Raises:
        UsageError: an option is not for the device.
    """
    device = values["device"]
    if values["kv_k_before_rope"] and device != "reference":
        raise UsageError(
            f"--kv-k-before-rope: kernels read K as it is after RoPE, and device {device} has no "
            "others",
            hint="leave it out, or compare with --device reference, which is slow",
        )
    rope = RopeOptions.of(values)
    return {
        **{name: values[name] for name in _AS_NAMED},
        **asdict(rope),
        **window_arguments(values),
        "k_before_rope": values["kv_k_before_rope"],
        "n_batch": min(values["batch_size"], values["ubatch_size"]),
        "n_threads": given_threads(values["threads"]),
        "n_threads_batch": given_threads(values["threads_batch"]),
        **placement_arguments(values),
        **offload_arguments(values),
        **ladder_arguments(values),
        **adapter_arguments(values),
    }


_TYPE_FLAGS = {
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "preset": "--preset",
    "kv_profile": "--kv-profile",
    "kv_bits": "--kv-bits",
}


def _budget(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | Literal["auto"] | None:
    if value is not None and value.strip().lower() == "auto":
        return "auto"
    n_bytes = byte_size_of(ctx, param, value)
    if n_bytes == 0:
        raise UsageError("--kv-budget 0 has no room for anything", hint="use a size, or auto")
    return n_bytes


def _ladder(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[Pair, ...] | None:
    return None if value is None else parse_ladder(value)


def ladder_options() -> list[click.Parameter]:
    """`--kv-budget` and `--kv-ladder`; `ladder_arguments` reads them."""
    return [
        KV_CACHE.option(
            "--kv-budget",
            metavar="SIZE",
            callback=_budget,
            help="The bytes that K and V may take, such as 512MiB, or auto for what is free. "
            "When they are full, the oldest pages change to the next types of --kv-ladder, "
            "and the context goes on.",
        ),
        KV_CACHE.option(
            "--kv-ladder",
            metavar="PAIRS",
            callback=_ladder,
            help="The types that pages of a cache with a budget go through, pairs K/V with commas "
            f"between them. [default: {ladder_text(DEFAULT_LADDER)}]",
        ),
    ]


def ladder_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that these options stand for; none without a budget.

    Raises:
        UsageError: there is a ladder without a budget, or types are named as well.
    """
    budget, ladder = values["kv_budget"], values["kv_ladder"]
    if budget is None:
        if ladder is not None:
            raise UsageError(
                "--kv-ladder says what pages change to within --kv-budget, and there is none",
                hint="add --kv-budget SIZE, or name the types with -ctk and -ctv",
            )
        return {}
    ctx = click.get_current_context()
    for name, type_flag in _TYPE_FLAGS.items():
        if ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT):
            raise UsageError(
                f"--kv-budget takes the types of --kv-ladder, and {type_flag} names others",
                hint=f"leave out {type_flag}, and name the types with --kv-ladder",
            )
    return {"cache_type_k": None, "cache_type_v": None, "kv_budget": budget, "kv_ladder": ladder}


_PROFILED = {"cache_type_k": "type_k", "cache_type_v": "type_v"}
_WINDOW_TYPES = ("cache_type_k_swa", "cache_type_v_swa")


def profile_option() -> click.Parameter:
    """`--kv-profile`."""
    return KV_CACHE.option(
        "--kv-profile",
        metavar="FILE",
        type=FILE,
        shell_complete=file_values,
        help="Take the types of K and V for each layer from a file that localkv calibrate "
        "wrote for this model. auto looks for it beside the model (MODEL.kv.json) and "
        "in the data folder. -ctk and -ctv win over its types, --preset says how many "
        "bits it may take, and its own pair wins where it diverges less.",
    )


def bits_option() -> click.Parameter:
    """`--kv-bits`."""
    return KV_CACHE.option(
        "--kv-bits",
        type=click.FloatRange(0, min_open=True),
        metavar="N",
        help="Bits per value, on average, that the types of --kv-profile may take in the context, "
        "their tail and sink included. [default: 5]",
    )


def profile_arguments(values: Mapping[str, Any], model: Path) -> dict[str, Any]:
    """The arguments of `LLM` that take a profile's place for types; none if there is no profile.

    A preset takes the types of a profile if one is found that has at most its bits. The profile
    also has to diverge less than the preset's own pair, as far as that was measured.

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
            usable = usable and not Overrides.of(values)
            name = _found(model) if usable else None
        if name is None:
            return {}
        if (profile := _read(name, model)) is not None and _takes_own(profile, preset, bits):
            return {"kv_profile": str(name)} if profile.smoothing_name else {}
    if name is None and bits is None:
        return {}
    types = dict.fromkeys(_PROFILED)
    return {**types, "kv_profile": str(name or "auto"), "kv_bits": bits}


_F16 = 16.0


def preset_bits(name: str) -> float:
    """Bits per value of a preset's pair, on average."""
    preset = PRESETS[name]
    formats = [KV_FORMATS[one] for one in (preset.type_k, preset.type_v)]
    return sum(8 * fmt.block_bytes / fmt.block_size for fmt in formats) / 2


def _found(model: Path) -> Path | None:
    """The profile of a model, if it has one; what is wrong with a model is said when it loads."""
    from localkv.loader.chosen_cache import profile_path

    try:
        return profile_path(model)
    except ModelFileError:
        return None


def _read(name: str | Path, model: Path) -> KVProfile | None:
    """A profile; None if "auto" finds none, which is said when the model loads."""
    from localkv.cache.profile import read_profile
    from localkv.loader.chosen_cache import AUTO

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
        return any(values[name] != getattr(PRESETS[preset], of) for name, of in _PROFILED.items())
    ctx = click.get_current_context()
    return any(ctx.get_parameter_source(name) != ParameterSource.DEFAULT for name in _PROFILED)


PLACEMENT = ("cpu_mask", "cpu_range", "cpu_strict")


def placement_options() -> list[click.Parameter]:
    """`placement_arguments` reads them."""
    return [
        MODEL.option(
            "-C --cpu-mask",
            metavar="MASK",
            help="CPUs that this process may use, as a hexadecimal mask: f is the first four. "
            "[default: all that taskset or a container leaves]",
        ),
        MODEL.option(
            "-Cr --cpu-range",
            metavar="LOW-HIGH",
            help="CPUs that this process may use, from one to another, such as 0-3. With -C both "
            "sets count.",
        ),
        MODEL.option(
            "--cpu-strict",
            type=Choice(("0", "1")),
            default="0",
            metavar="0|1",
            help="1: each thread of the kernels has one of these CPUs for itself.",
        ),
    ]


def placement_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that their values stand for.

    Raises:
        UsageError: a CPU does not exist, or may not be used.
    """
    found = set[int]()
    for name, text in (("-C", values["cpu_mask"]), ("-Cr", values["cpu_range"])):
        if text is None:
            continue
        try:
            last = (os.cpu_count() or 1) - 1
            cpus = cpus_of_mask(text) if name == "-C" else cpus_of_range(text, last)
            check_cpus(cpus)
        except UsageError as error:
            raise UsageError(f"{name} {text}: {error.message}", hint=error.hint) from None
        found |= cpus
    return {"cpus": sorted(found) or None, "cpu_strict": values["cpu_strict"] == "1"}


_OFFLOAD = Panel("Several devices")
OFFLOAD = (
    *("n_gpu_layers", "n_cpu_moe", "cpu_moe", "override_tensor"),
    *("offload_kqv", "tensor_split", "main_gpu"),
)


def _layers(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> int | Literal["all"] | None:
    """A number of layers, all of them, or None for what fits."""
    text = (value or "auto").strip().lower()
    if text in ("auto", "-1"):
        return None
    if text in ("all", "-2"):
        return "all"
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise UsageError(
            f"{param.opts[0]} {quoted(value or '')} is no number of layers",
            hint="use a number, all or auto",
        )
    return int(text)


MOST_DIGITS = 6
"""Digits of a number of layers."""


def _split(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    if value is None:
        return None
    try:
        return tuple(float(part) for part in re.split("[,/]", value))
    except ValueError:
        raise UsageError(f"-ts {quoted(value)} is no list of shares", hint="such as 3,1") from None


def offload_options() -> list[click.Parameter]:
    """Options about what is on a GPU; `offload_arguments` reads them."""
    return [
        _OFFLOAD.option(
            "n_gpu_layers -ngl --gpu-layers --n-gpu-layers",
            llama_env="N_GPU_LAYERS",
            metavar="N",
            callback=_layers,
            help="The last N layers are on the GPU, the output counts as one more, and the others "
            "are on the CPU; or all, or auto for as many as fit. [default: auto]",
        ),
        _OFFLOAD.option(
            "-ncmoe --n-cpu-moe",
            llama_env="N_CPU_MOE",
            type=Whole(0),
            default=0,
            help="The experts of the first N layers are on the CPU.",
        ),
        _OFFLOAD.flag("-cmoe --cpu-moe", llama_env="CPU_MOE", help="All experts are on the CPU."),
        _OFFLOAD.option(
            "-ot --override-tensor",
            llama_env="OVERRIDE_TENSOR",
            multiple=True,
            metavar="REGEX=PLACE",
            help="Parts whose tensors' names match are in a place, CPU or CUDA0, as in "
            '"ffn_.*_exps=CPU". What moves together is a layer\'s attention, its feed-forward '
            "block, the embedding and the output.",
        ),
        _OFFLOAD.option(
            "offload_kqv -kvo/-nkvo --kv-offload/--no-kv-offload",
            llama_env="KV_OFFLOAD",
            type=bool,
            default=True,
            help="Attention and its cache are on the GPU where its layer is, or all on the CPU.  "
            "[default: kv-offload]",
        ),
        _OFFLOAD.option(
            "-ts --tensor-split",
            llama_env="TENSOR_SPLIT",
            metavar="N,...",
            callback=_split,
            help="How much of the layers each GPU of --device gets, in proportion. [default: as "
            "much as is free there]",
        ),
        _OFFLOAD.option(
            "-mg --main-gpu",
            llama_env="MAIN_GPU",
            type=Whole(0, MOST_GPUS),
            default=0,
            help="The GPU that --device auto and cuda stand for.",
        ),
    ]


MOST_GPUS = 127


def offload_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that their values stand for."""
    found = {name: values[name] for name in OFFLOAD if name != "cpu_moe"}
    found["override_tensor"] = list(found["override_tensor"])
    if values["cpu_moe"]:
        found["n_cpu_moe"] = "all"
    return found


def speculation_options() -> list[click.Parameter]:
    """How tokens are guessed."""
    return [
        _SPEED.option(
            "spec --spec-type --spec",
            type=Choice(DRAFTERS),
            help="Guess tokens and evaluate several at once; the text stays the same. ngram: go on "
            "as the text did where its last tokens came up before. draft: as -md's model says. "
            "mtp: as a block of the model's own file says, on a CPU, or as the text did if that is "
            "longer. [default: draft with -md, else mtp if the file has such a block, else none]",
        ),
        *draft_model_options(),
        _SPEED.option(
            "draft_max --spec-draft-n-max --draft-max --draft",
            llama_env="SPEC_DRAFT_N_MAX",
            type=Whole(1, MOST_DRAFTED),
            default=Speculation.draft_max,
            help="Most tokens guessed at a time; how many are worth it is measured.",
        ),
        _SPEED.option(
            "draft_min --spec-draft-n-min --draft-min",
            llama_env="SPEC_DRAFT_N_MIN",
            type=Whole(1, MOST_DRAFTED),
            default=Speculation.draft_min,
            help="Guess nothing where fewer tokens than this are worth it.",
        ),
        _SPEED.option(
            "draft_p_min --spec-draft-p-min --draft-p-min",
            llama_env="SPEC_DRAFT_P_MIN",
            type=click.FloatRange(0, 1),
            default=Speculation.draft_p_min,
            metavar="P",
            help="Guess no token that the draft model finds less probable.",
        ),
    ]


def draft_model_options() -> list[click.Parameter]:
    """A model that drafts, and its cache."""

    def types(side: str) -> click.Parameter:
        spellings = f"-ct{side}d --spec-draft-type-{side} --cache-type-{side}-draft"
        return _SPEED.option(
            f"cache_type_{side}_draft {spellings}",
            llama_env=f"SPEC_DRAFT_CACHE_TYPE_{side.upper()}",
            type=_CACHE_TYPE,
            default=CacheConfig.type_k if side == "k" else CacheConfig.type_v,
            metavar="TYPE",
            help=f"The type of {side.upper()} in the cache of the draft model.",
        )

    return [
        _SPEED.option(
            "draft_model -md --spec-draft-model --model-draft",
            llama_env="SPEC_DRAFT_MODEL",
            metavar="FILE",
            help="A small model with the same tokens, which guesses how the text goes on.",
        ),
        types("k"),
        types("v"),
    ]


_SPECULATION = ("spec", "draft_model", "draft_max", "draft_min", "draft_p_min")
_DRAFT_TYPES = ("cache_type_k_draft", "cache_type_v_draft")


def speculation_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the values stand for; none for a command without the options.

    Raises:
        UsageError: there is no model that drafts, or it is not used.
        ModelFileError: its file can't be read.
    """
    if "spec" not in values:
        return {"spec": "none"}
    file, spec = values["draft_model"], values["spec"]
    if spec is not None or file is not None:
        check_drafter(Speculation(spec or "draft"), file)
    if file is not None and not os.path.isfile(file):
        from localkv.loader.gguf_file import open_gguf

        open_gguf(file)  # says what is wrong before anything heavy is imported
    return {name: values[name] for name in (*_SPECULATION, *_DRAFT_TYPES)}
