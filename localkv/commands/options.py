"""Options: how one is declared, and those that most commands share.

Every option can also be set by a variable `LOCALKV_<LONG NAME>`, by llama.cpp's `LLAMA_ARG_*`
where its option means the same, and by the configuration file. Names are llama.cpp's.

`--preset` stands for `-ctk` and `-ctv`, unless a type is named as near to the user or nearer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from localkv.commands.completion import cached_values, file_values, model_values
from localkv.commands.output import say
from localkv.commands.parsing import FILE, TEXT, Argument, Choice, Option, Whole, distance
from localkv.config import DEVICES, PRESETS, device_name
from localkv.errors import UsageError

DEFAULT_LOGICAL_BATCH = 2048
DEFAULT_BATCH = 512
MAX_THREADS = 512  # llama.cpp's limit; OpenMP crashes somewhere above


class Panel:
    """A heading of the help, and what declares the options under it.

    Args:
        name: the heading.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def option(self, names: str, *, llama_env: str | None = None, **attributes: Any) -> Option:
        """An option with its variables. A default is shown; a whole number is N.

        Args:
            names: the spellings with spaces between them, after the parameter's name where that is
                not the longest spelling.
            llama_env: the part after `LLAMA_ARG_` of llama.cpp's variable.
            attributes: click's.
        """
        spellings = names.split()
        long_names = [name.split("/")[0][2:] for name in spellings if name.startswith("--")]
        envvar = [f"LOCALKV_{name.upper().replace('-', '_')}" for name in long_names]
        if llama_env is not None:
            envvar.append(f"LLAMA_ARG_{llama_env}")
        names_file = attributes.get("metavar") == "FILE"
        is_flag = attributes.get("is_flag")
        attributes.setdefault("type", None if is_flag else FILE if names_file else TEXT)
        if names_file:
            attributes.setdefault("shell_complete", file_values)
        if isinstance(attributes["type"], Whole):
            attributes.setdefault("metavar", "N")
        if "default" in attributes and attributes["type"] is not bool and not is_flag:
            attributes.setdefault("show_default", True)
        return Option(spellings, panel=self.name, envvar=envvar, **attributes)

    def flag(self, names: str, **attributes: Any) -> Option:
        """An option without a value."""
        return self.option(names, is_flag=True, default=False, **attributes)


class Device(Choice):
    """The name of a device, or of GPUs with commas between them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        names = [device_name(name) for name in str(value).split(",")]
        if all(name.startswith("cuda") and name[4:].isdecimal() for name in names):
            return ",".join(names)
        return super().convert(value, param, ctx)


MODEL, KV_CACHE, OUTPUT, TEXTS = map(Panel, ("Model", "KV cache", "Output", "Text"))
MEASURE, RUN, PLAN = map(Panel, ("Measure", "Run", "Plan"))


def quiet_option(help: str) -> Option:
    """`-q`."""
    return OUTPUT.flag("-q --quiet", help=help)


def raw_option() -> Option:
    """`--raw`, for commands that print text of a model or a file."""
    return OUTPUT.flag(
        "--raw",
        help="Send control characters to a terminal as they are; otherwise visible symbols replace "
        "them. Files and pipes always get them.",
    )


def model_options() -> list[click.Parameter]:
    """The options that name a model; `model_file` reads them."""
    return [
        MODEL.option(
            "-m --model",
            llama_env="MODEL",
            metavar="FILE",
            shell_complete=model_values,
            help="GGUF file (any part of a split one), or hf.co/ORG/REPO as -hf takes it.",
        ),
        MODEL.option(
            "-hf -hfr --hf-repo",
            llama_env="HF_REPO",
            metavar="NAME",
            shell_complete=cached_values,
            help="ORG/REPO[:QUANT] on Hugging Face, fetched if it is not in the cache; QUANT is "
            "Q4_K_M if there is one, else Q8_0.",
        ),
        hf_file_option(),
        MODEL.flag(
            "--offline", llama_env="OFFLINE", help="Use only models in the cache; make no request."
        ),
    ]


def file_argument() -> Argument:
    """The model's file without `-m`."""
    return Argument(
        ["file"],
        required=False,
        type=TEXT,
        metavar="[FILE]",
        shell_complete=model_values,
        help="The same as -m FILE.",
    )


def reference_argument(help: str) -> Argument:
    """A model on Hugging Face, by its name there."""
    return Argument(
        ["reference"],
        required=True,
        type=TEXT,
        metavar="ORG/REPO[:QUANT]",
        shell_complete=cached_values,
        help=help,
    )


def hf_file_option() -> Option:
    return MODEL.option(
        "-hff --hf-file",
        llama_env="HF_FILE",
        metavar="FILE",
        shell_complete=lambda ctx, param, incomplete: [],
        help="This file of the repository, whatever its type.",
    )


def override_pre_option() -> Option:
    return MODEL.option(
        "--override-pre",
        metavar="NAME",
        help="Use this pre-tokenizer instead of the file's (tokenizer.ggml.pre).",
    )


def _overrides(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, str | int | float | bool] | None:
    """Values by key, as of `KEY=TYPE:VALUE,...`; a comma within quotes is part of a value."""
    found: dict[str, str | int | float | bool] = {}
    for text in given:
        for item in _row(text):
            key, is_there, value = item.partition("=")
            kind, _, value = value.partition(":")
            if not (key and is_there and kind in _READ_AS):
                raise UsageError(
                    f"--override-kv: {item!r:.80} is not KEY=TYPE:VALUE",
                    hint="TYPE is int, float, bool or str, as in tokenizer.ggml.add_bos_token="
                    "bool:false",
                )
            if key in found:
                raise UsageError(f"--override-kv names {key!r:.80} twice")
            try:
                found[key] = _READ_AS[kind](value)
            except (ValueError, KeyError):
                raise UsageError(
                    f"--override-kv: {key!r:.80} is {value!r:.60}, which is no {kind}",
                    hint="a bool is true or false" if kind == "bool" else None,
                ) from None
    return found or None


def _row(text: str) -> list[str]:
    """What commas separate; one that begins with a quote may have some, and "" for a quote."""
    items, is_quoted, characters = [""], False, iter(text)
    for one in characters:
        if one == '"' and (is_quoted or not items[-1]):
            is_quoted = not is_quoted
            if not is_quoted and (after := next(characters, None)) is not None:
                is_quoted = after == '"'
                items += [""] if after == "," else []
                items[-1] += "" if after == "," else after
        elif one == "," and not is_quoted:
            items.append("")
        else:
            items[-1] += one
    return items


_READ_AS: dict[str, Callable[[str], str | int | float | bool]] = {
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.__getitem__,
    "str": str,
}


def override_kv_option() -> Option:
    return MODEL.option(
        "--override-kv",
        multiple=True,
        callback=_overrides,
        metavar="KEY=TYPE:VALUE,...",
        help="Take this value for a key of the model's file instead of the file's, e.g. "
        "tokenizer.ggml.add_bos_token=bool:false; TYPE is int, float, bool or str. May be given "
        "again.",
    )


def escape_option(panel: Panel, where: str) -> Option:
    return panel.option(
        "-e --escape/--no-escape",
        type=bool,
        default=True,
        help=rf"On by default: process \n \r \t \' \" \\ \xHH in {where}.",
    )


def json_option() -> Option:
    return OUTPUT.flag("as_json --json", help="Print one JSON object.")


def preset_option() -> Option:
    """`--preset`; it is eager, so that `preset_or_given` knows it."""
    pairs = ", ".join(f"{name} ({p.type_k}/{p.type_v})" for name, p in PRESETS.items())
    return KV_CACHE.option(
        "--preset",
        type=Choice(tuple(PRESETS), case_sensitive=False),
        is_eager=True,
        metavar="NAME",
        help=f"The types of K and V by purpose: {pairs}. -ctk and -ctv win over it.",
    )


def context_option(n_ctx: int | None) -> Option:
    """`-c`; `n_ctx` is the default, None for `LLM`'s choice."""
    return KV_CACHE.option(
        "n_ctx -c --ctx-size",
        llama_env="CTX_SIZE",
        type=Whole(0),
        default=n_ctx,
        help="Tokens of context; 0 for all that the model was trained with."
        + (" [default: the same, but at most 4096]" if n_ctx is None else ""),
    )


def compute_options(default_threads: str) -> list[click.Parameter]:
    """The options for the place where a model runs and the tokens that it evaluates at a time."""
    return [
        MODEL.option(
            "-b --batch-size",
            llama_env="BATCH",
            type=Whole(1),
            default=DEFAULT_LOGICAL_BATCH,
            help="An upper bound on -ub, as in llama.cpp.",
        ),
        MODEL.option(
            "-ub --ubatch-size",
            llama_env="UBATCH",
            type=Whole(1),
            default=DEFAULT_BATCH,
            help="Most prompt tokens evaluated at a time.",
        ),
        MODEL.option(
            "-t --threads",
            llama_env="THREADS",
            type=Whole(-1, MAX_THREADS),
            help=f"CPU threads. [default: {default_threads}]",
        ),
        MODEL.option(
            "-tb --threads-batch",
            type=Whole(-1, MAX_THREADS),
            help="CPU threads where several tokens are evaluated at once, as in prompts. "
            "[default: as -t]",
        ),
        MODEL.option(
            "-dev --device",
            type=Device(DEVICES, case_sensitive=False),
            default="auto",
            metavar="NAME",
            help=f"Where to run: {', '.join(DEVICES)} (slow, for comparison). auto: a supported "
            "GPU if there is one. cuda1 is a GPU by its number; cuda0,cuda1 share the layers.",
        ),
    ]


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


def refuse(names: tuple[str, ...], reason: str, hint: str) -> None:
    """Refuse options on the command line.

    Args:
        names: of parameters.
        reason: why they have no effect.

    Raises:
        UsageError: names the first one.
    """
    ctx = click.get_current_context()
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "") == ParameterSource.COMMANDLINE
        if given and param.name in names:
            raise UsageError(f"{param.opts[-1]} has no effect: {reason}", hint=hint)
