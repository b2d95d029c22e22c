"""From the values of `loading_options` to a model that is ready."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localkv.cache.scales import read_kv_scales, require_scales
from localkv.cli.model_file import model_file
from localkv.cli.options import loading_arguments
from localkv.cli.preset_choice import say_preset
from localkv.system.limits import before_torch

if TYPE_CHECKING:
    from localkv.llm import LLM


def load_llm(values: Mapping[str, Any], *, quiet: bool = False) -> LLM:
    """Load the model; a file that is missing is an error before torch is imported.

    So are scales of the cache that are missing or can't be read. Unless `quiet`, the flags of a
    preset are printed.
    """
    if not quiet:
        say_preset(values)
    require_scales(
        (values["cache_type_k"], values["cache_type_v"]), values["kv_scales"] is not None
    )
    path = model_file(values)
    if not path.is_file():
        from localkv.loader.gguf_file import open_gguf

        open_gguf(path)  # reports a bad file seconds before torch would be imported
    arguments = loading_arguments(values)
    if arguments["kv_scales"] is not None:
        arguments["kv_scales"] = read_kv_scales(arguments["kv_scales"])
    before_torch()
    from localkv.llm import LLM

    llm = LLM(path, **arguments)
    if values["threads"] is not None and llm.backend.hardware:
        llm.warnings.append("-t has no effect on a GPU: it sets threads of the CPU")
    return llm


def all_warnings(llm: LLM) -> list[str]:
    """Warnings about the model and its tokenizer, each once."""
    return list(dict.fromkeys((*llm.warnings, *llm.tokenizer.warnings)))
