"""`localkv show --kv`: K and V of a model that runs a text, or what a KV profile knows of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from localkv.cli.kv.view import KVView, Shift, kv_facts, kv_lines, of_profile, require_rows
from localkv.cli.model.file import model_file
from localkv.cli.options import escape_option, flag, option
from localkv.cli.options.loading import loading_options, unoffered_values
from localkv.cli.output.messages import note, warn
from localkv.cli.output.picture_file import check_plot
from localkv.cli.output.progress_line import ProgressLine
from localkv.cli.output.text_output import TextOutput
from localkv.cli.parsing.escapes import unescape
from localkv.cli.parsing.option_types import Whole
from localkv.cli.parsing.prompt import read_file, without_final_newline
from localkv.errors import UsageError, counted, printable

if TYPE_CHECKING:
    from localkv.llm import LLM

DEFAULT_TOKENS = 1024
BUILT_IN = "the built-in text"

_USED = (
    *("cache_type_k", "cache_type_v", "preset", "cache_type_k_swa", "cache_type_v_swa"),
    *("cache_type_k_rope", "kv_tail", "kv_sink", "kv_rotation", "kv_scales", "kv_profile"),
    *("kv_bits", "batch_size", "ubatch_size", "threads", "threads_batch", "device", "fit"),
    *("mlock", "use_mmap", "override_pre"),
)
"""Options as other commands have them, besides those that name a model."""
_OF_RUNS = (*_USED, "file_of_text", "prompt", "escape", "tokens")
_MODEL_OPTIONS = ("model", "hf_repo", "hf_file", "offline")


def kv_options() -> list[click.Parameter]:
    """The options that only `--kv` has."""
    return [
        flag(
            "--kv",
            panel="K and V",
            help="Run a text, and show the magnitudes of K and V by layer, and outlier channels. "
            "With types of a cache (-ctk, -ctv, --kv-profile) also how far attention moves from "
            "that with f16. FILE may be a KV profile, which is shown without a model.",
        ),
        option(
            "file_of_text",
            "-f",
            "--file",
            panel="K and V",
            metavar="FILE",
            help="The text, UTF-8; - is stdin. [default: one that comes with localkv]",
        ),
        option("-p", "--prompt", panel="K and V", metavar="TEXT", help="The text itself."),
        escape_option("K and V", "-p"),
        option(
            "--tokens",
            panel="K and V",
            type=Whole(1),
            default=DEFAULT_TOKENS,
            show_default=True,
            metavar="N",
            help="Most tokens of the text.",
        ),
        option(
            "plot_file",
            "--plot",
            panel="K and V",
            metavar="FILE",
            help="Draw it as a picture (.png, .svg, .pdf).",
        ),
        *(param for param in loading_options() if param.name in _USED),
    ]


def check_alone() -> None:
    """Refuse options that have no meaning without `--kv`.

    Raises:
        UsageError: names the first one.
    """
    refuse((*_OF_RUNS, "plot_file"), "without --kv nothing is run", "add --kv")


def refuse(names: tuple[str, ...], reason: str, hint: str) -> None:
    """Refuse options on the command line."""
    ctx = click.get_current_context()
    for param in ctx.command.params:
        given = ctx.get_parameter_source(param.name or "") == ParameterSource.COMMANDLINE
        if given and param.name in names:
            raise UsageError(f"{param.opts[-1]} has no effect: {reason}", hint=hint)


def show_kv(
    *,
    file: str | None,
    file_of_text: str | None,
    prompt: str | None,
    escape: bool,
    tokens: int,
    plot_file: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Run the command.

    Raises:
        UsageError: options contradict each other, or the model keeps no K and V.
        ModelFileError: the file is damaged.
    """
    if plot_file is not None:
        check_plot(plot_file)
    path = model_file(values, argument=file)
    if _is_json(path):
        refuse(
            _OF_RUNS, f"{printable(path)} is shown without a model", "name the model, not a profile"
        )
        view = profile_view(path)
    else:
        text, what = _text(file_of_text, prompt, escape)
        values = {**values, "model": str(path), "hf_repo": None, "hf_file": None}
        view = _measured(values, text, what, tokens)
    with TextOutput(None) as out:
        if as_json:
            out.write(json.dumps({"path": str(path), **kv_facts(view)}, ensure_ascii=False))
        else:
            out.write("\n".join(kv_lines(view)))
    if plot_file is not None:
        from localkv.cli.kv.plot import draw

        draw(view, plot_file)


def profile_view(path: Path) -> KVView:
    """What a file of `localkv calibrate` knows.

    Raises:
        UsageError: it is none.
    """
    from localkv.cache.profile_file import read_profile

    profile = read_profile(path)
    require_rows(profile.layers)
    return of_profile(profile)


def _is_json(path: Path) -> bool:
    """Whether a file is a profile rather than a model; what can't be read is a model's matter."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError:
        return False


def _text(file: str | None, prompt: str | None, escape: bool) -> tuple[str, str]:
    """The text, and what it is."""
    if file is not None and prompt is not None:
        raise UsageError("-p and -f both give the text, use one")
    if prompt is not None:
        return unescape(prompt) if escape else prompt, "the prompt"
    if file is not None:
        name = "stdin" if file == "-" else printable(Path(file).name)
        return without_final_newline(read_file(file, "the text")), name
    from localkv.quality.calibration_text import calibration_text

    return calibration_text(), BUILT_IN


def _measured(values: Mapping[str, Any], text: str, what: str, n_tokens: int) -> KVView:
    from localkv.cli.model.loading import all_warnings, load_llm

    llm = load_llm({**unoffered_values((*_USED, *_MODEL_OPTIONS)), **values})
    for line in all_warnings(llm):
        warn(line)
    from localkv.config import CacheConfig
    from localkv.loader.found_profile import AUTO, model_profile
    from localkv.loader.smoothing import NO_SMOOTHING
    from localkv.quality.channels import channel_ranges
    from localkv.quality.kv_profile import layer_facts

    if not llm.config.groups:
        require_rows(())
    ids = llm.tokenize(text)
    if not ids:
        raise UsageError("the text has no tokens")
    n = min(n_tokens, llm.config.n_ctx_train)
    if len(ids) > n and what != BUILT_IN:
        note(f"the first {n} of {len(ids)} tokens are read (--tokens)")
    ids = ids[:n]
    model, n_batch = llm.engine.model, llm.engine.n_batch
    llm.check_further_cache(CacheConfig("f32", "f32", n_ctx=len(ids)))
    with ProgressLine() as progress:
        progress.show(f"K and V of {counted(len(ids), 'token')}")
        ranges = channel_ranges(model, [ids], n_ctx=len(ids), n_batch=n_batch)
        shift = _shift(llm, ids, progress)
    profile = None
    if name := values["kv_profile"] or (llm.kv_types and AUTO):  # a preset takes one that it finds
        profile = model_profile(llm.gguf, name)
    costs = {
        (i, side, name): kld
        for i, layer in enumerate(profile.layers if profile else ())
        if layer is not None
        for side, facts in enumerate((layer.k, layer.v))
        for name, kld in facts.kld.items()
    }
    latent = all(group.is_latent for group in llm.config.groups)
    return KVView(
        llm.config.name,
        what,
        len(ids),
        profile.smoothing if profile else 0.0,
        tuple(layer_facts(i, found, costs, NO_SMOOTHING, ()) for i, found in enumerate(ranges)),
        sides=("latents", "rotated keys") if latent else ("K", "V"),
        chosen=llm.kv_types,
        shift=shift,
    )


def _shift(llm: LLM, ids: list[int], progress: ProgressLine) -> Shift | None:
    """Of the cache that is asked for, unless that is f16."""
    from dataclasses import replace

    from localkv.quality.attention_shift import attention_shift

    if set(llm.cache.types) == {"f16"}:
        return None
    types = "/".join(llm.cache.shown_types)
    if llm.kv_types is not None:
        types = f"types by layer of {llm.kv_types.bits:.3g} bits"
    for name in ("tail", "sink"):
        if n := getattr(llm.cache, f"kv_{name}"):
            types += f", {name} {n}"
    progress.show(f"attention with f16 and with {types}")
    cache = replace(llm.cache, n_ctx=len(ids))
    moved = attention_shift(llm.engine.model, ids, cache, n_batch=llm.engine.n_batch)
    return Shift(types, tuple(moved))
