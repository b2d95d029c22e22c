"""The options that say how a model is loaded and what cache it gets; commands share them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import click

from localkv.cli.options import (
    compute_options,
    context_option,
    flag,
    model_options,
    option,
    override_pre_option,
    preset_option,
)
from localkv.cli.options.ladder import ladder_arguments, ladder_options
from localkv.cli.options.placement import placement_arguments, placement_options
from localkv.cli.options.preset import preset_or_given
from localkv.cli.options.profile import bits_option, profile_option
from localkv.cli.parsing.option_types import Choice, Whole
from localkv.cli.parsing.parameters import Option
from localkv.config import FIT, KV_ROTATIONS, MOST_EXACT, CacheConfig
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS


def _cache_type_option(side: str, short: str) -> Option:
    return option(
        short,
        f"--cache-type-{side.lower()}",
        panel="KV cache",
        llama_env=f"CACHE_TYPE_{side}",
        type=Choice(tuple(KV_FORMATS), case_sensitive=False),
        default="f16",
        show_default=True,
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
        return option(
            short,
            f"--cache-type-{side.lower()}-swa",
            panel="KV cache",
            type=Choice(tuple(KV_FORMATS), case_sensitive=False),
            metavar="TYPE",
            help=help_text,
        )

    def exact(name: str, help_text: str) -> Option:
        return option(
            f"--kv-{name}",
            panel="KV cache",
            type=Whole(0, MOST_EXACT),
            metavar="N",
            help=help_text,
        )

    return [
        exact(
            "tail",
            "Each token reads the newest N tokens as f16, and only those before them packed. "
            "[default: 64 for types that pack several tokens together, else 0]",
        ),
        exact(
            "sink",
            "Keep the first N tokens as f16. [default: 4 for types of less than 4 bits per value, "
            "else 0]",
        ),
        types("K", "-ctk-swa", "The type of K in layers with a window. [default: as -ctk]"),
        types("V", "-ctv-swa", "The type of V in layers with a window. [default: as -ctv]"),
        flag(
            "--swa-full",
            panel="KV cache",
            llama_env="SWA_FULL",
            help="Keep all rows of layers with a window, not only those that later tokens see: "
            "more memory, and any prompt is reused as far as it is the same.",
        ),
        option(
            "-ctk-rope",
            "--cache-type-k-rope",
            panel="KV cache",
            type=Choice(tuple(KV_FORMATS), case_sensitive=False),
            metavar="TYPE",
            default=CacheConfig.type_k_rope,
            help="The type of the rotated parts of keys in models that keep latents (DeepSeek); "
            "-ctk is that of the latents, of which V is a view.",
        ),
        option(
            "-ctxcp",
            "--ctx-checkpoints",
            panel="KV cache",
            llama_env="CTX_CHECKPOINTS",
            type=Whole(0),
            metavar="N",
            default=CacheConfig.ctx_checkpoints,
            show_default=True,
            help="Copies of the states of recurrent layers that are kept at most, to go on from "
            "where a prompt begins like the last one.",
        ),
        option(
            "-cms",
            "--checkpoint-min-step",
            panel="KV cache",
            llama_env="CHECKPOINT_MIN_SPACING_NT",
            type=Whole(1),
            metavar="N",
            default=CacheConfig.checkpoint_min_step,
            show_default=True,
            help="Tokens between two of them within a text.",
        ),
    ]


def asked_types(values: Mapping[str, Any]) -> list[str]:
    """The cache types that are asked for."""
    names = (f"cache_type_{side}{group}" for group in ("", "_swa") for side in "kv")
    return [values[name] for name in names if values[name] is not None]


def window_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LLM` that the values of `window_options` stand for."""
    return {
        "cache_type_k_swa": values["cache_type_k_swa"],
        "cache_type_v_swa": values["cache_type_v_swa"],
        "swa_full": values["swa_full"],
        "cache_type_k_rope": values["cache_type_k_rope"],
        **_counts(values),
    }


def window_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same as fields of `CacheConfig`."""
    return {
        "type_k_swa": values["cache_type_k_swa"],
        "type_v_swa": values["cache_type_v_swa"],
        "swa_full": values["swa_full"],
        "type_k_rope": values["cache_type_k_rope"],
        **_counts(values),
    }


def _counts(values: Mapping[str, Any]) -> dict[str, Any]:
    names = ("ctx_checkpoints", "checkpoint_min_step", "kv_tail", "kv_sink")
    return {name: values[name] for name in names}


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
        option(
            "--kv-rotation",
            panel="KV cache",
            type=Choice(KV_ROTATIONS, case_sensitive=False),
            default="auto",
            show_default=True,
            metavar="WHEN",
            help="Rotate K and V before they are packed, which spreads outliers over a block: "
            f"{', '.join(KV_ROTATIONS)}. auto does so for types with blocks "
            f"({', '.join(name for name, fmt in KV_FORMATS.items() if fmt.shares_scale)}) if the "
            "head size is a multiple of 64, as llama.cpp does.",
        ),
        flag(
            "--kv-k-before-rope",
            panel="KV cache",
            help="Keep K as it is before RoPE, and rotate it whenever it is read, as KVQuant does: "
            "to compare, with --device reference only.",
        ),
        option(
            "--kv-scales",
            panel="KV cache",
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
        option(
            "-fit",
            "--fit",
            panel="Model",
            llama_env="FIT",
            type=Choice(FIT, case_sensitive=False),
            default="on",
            show_default=True,
            metavar="WHEN",
            help="on: refuse a model that does not fit in memory, before anything is allocated. "
            "off: try it.",
        ),
        flag(
            "--mlock",
            panel="Model",
            llama_env="MLOCK",
            help="Keep the weights in memory, so that the system never has to read them again.",
        ),
        option(
            "use_mmap",
            "--mmap/--no-mmap",
            panel="Model",
            llama_env="MMAP",
            type=bool,
            default=True,
            help="Map the model's file, or read it into memory.  [default: mmap]",
        ),
        override_pre_option(),
    ]


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
    return {
        "n_ctx": values["n_ctx"],
        "cache_type_k": values["cache_type_k"],
        "cache_type_v": values["cache_type_v"],
        **window_arguments(values),
        "kv_rotation": values["kv_rotation"],
        "k_before_rope": values["kv_k_before_rope"],
        "kv_scales": values["kv_scales"],
        "n_batch": min(values["batch_size"], values["ubatch_size"]),
        "n_threads": given_threads(values["threads"]),
        "n_threads_batch": given_threads(values["threads_batch"]),
        **placement_arguments(values),
        "device": values["device"],
        "override_pre": values["override_pre"],
        "fit": values["fit"],
        "mlock": values["mlock"],
        "use_mmap": values["use_mmap"],
        **ladder_arguments(values),
    }
