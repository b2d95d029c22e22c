"""From the values of `loading_options` to a model that is ready."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localkv.cache.scales import read_kv_scales, require_scales
from localkv.cli.model.file import model_file
from localkv.cli.options.loading import asked_types, loading_arguments
from localkv.cli.options.preset import say_preset
from localkv.cli.options.profile import profile_arguments
from localkv.cli.options.speculation import speculation_arguments
from localkv.cli.output.messages import one_line, say
from localkv.cli.output.terminal import OwnText
from localkv.system.garbage import uncollected
from localkv.system.limits import before_model
from localkv.system.loading_line import LoadingLine

if TYPE_CHECKING:
    from localkv.llm import LLM


def load_llm(values: Mapping[str, Any], *, quiet: bool = False) -> LLM:
    """Load the model; a file that is missing is an error before anything heavy is imported.

    So are scales of the cache that are missing or can't be read. Unless `quiet`, the flags of a
    preset are printed.
    """
    if values["kv_profile"] is None:
        require_scales(asked_types(values), values["kv_scales"] is not None)
    path = model_file(values)
    profile = profile_arguments(values, path)
    if not quiet and "kv_bits" not in profile:
        say_preset(values)
    if not path.is_file():
        from localkv.loader.gguf_file import open_gguf

        open_gguf(path)  # reports a bad file before anything heavy is imported
    arguments = loading_arguments(values) | profile | speculation_arguments(values)
    if arguments["kv_scales"] is not None:
        arguments["kv_scales"] = read_kv_scales(arguments["kv_scales"])
    before_model()
    with uncollected():
        from localkv.llm import LLM

    with LoadingLine(one_line(path.name), write=_to_terminal) as line:
        llm = LLM(path, **arguments, on_progress=line)
    if "kv_bits" in profile and not quiet:
        say(profile_line(llm))
    for name, flag in (("threads", "-t"), ("threads_batch", "-tb")):
        if values[name] is not None and llm.backend.hardware:
            llm.warnings.append(f"{flag} has no effect on a GPU: it sets threads of the CPU")
    return llm


def profile_line(llm: LLM) -> str:
    """What a profile has chosen, in one line."""
    types = llm.kv_types
    assert types is not None
    size = types.in_words(llm.cache.kv_tail)
    return f"KV profile: {size}, KLD {types.verified:.1e} where it was measured"


def _to_terminal(text: str) -> None:
    print(OwnText(text), end="", file=sys.stderr, flush=True)


def all_warnings(llm: LLM) -> list[str]:
    """Warnings about the model and its tokenizer, each once."""
    return list(dict.fromkeys((*llm.warnings, *llm.tokenizer.warnings)))
