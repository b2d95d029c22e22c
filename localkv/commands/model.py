"""From the values of `loading_options` to a model that is ready, and its memory in words."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from localkv.cache.cache_checks import keeps_latents
from localkv.cache.ladder import ladder_text
from localkv.cache.profile import read_kv_scales, require_scales
from localkv.commands.loading_options import (
    asked_types,
    loading_arguments,
    profile_arguments,
    speculation_arguments,
)
from localkv.commands.model_file import model_file
from localkv.commands.options import say_preset
from localkv.commands.output import OwnText, one_line, say
from localkv.errors import byte_size, counted
from localkv.system.limits import before_model
from localkv.system.loading_line import LoadingLine, OnProgress, compiling_line, shows_lines
from localkv.system.this_process import uncollected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from localkv.config import CacheConfig
    from localkv.llm import LLM
    from localkv.memory.plan import MemoryPlan


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
        told = line if quiet or shows_lines() else _telling_of_kernels(line)
        llm = LLM(path, **arguments, on_progress=told)
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


def _telling_of_kernels(on_progress: OnProgress) -> OnProgress:
    """Print a line when the first kernels to compile are reported, and hand everything on."""
    has_told = False

    def told(stage: str, done: int, total: int) -> None:
        nonlocal has_told
        if stage == "kernels" and total and not has_told:
            has_told = True
            say(compiling_line(total))
        on_progress(stage, done, total)

    return told


def _to_terminal(text: str) -> None:
    print(OwnText(text), end="", file=sys.stderr, flush=True)


def all_warnings(llm: LLM) -> list[str]:
    """Warnings about the model and its tokenizer, each once."""
    return list(dict.fromkeys((*llm.warnings, *llm.tokenizer.warnings)))


def memory_line(llm: LLM) -> str:
    """One line: weights (mapped from the file, allocated, or both), K, V, scratch; the GPU."""
    plan, cache = llm.memory, llm.cache
    if plan.weights_mapped == 0:
        weights = f"{byte_size(plan.weights)} allocated"
    elif plan.weights_allocated == 0:
        weights = f"{byte_size(plan.weights)} mapped"
    else:
        weights = f"{byte_size(plan.weights)} ({byte_size(plan.weights_mapped)} mapped)"
    if plan.weights_decoded:
        weights += f", {byte_size(plan.weights_decoded)} of them decoded to float32"
    if plan.weights_by_row:
        weights += f" and {byte_size(plan.weights_by_row)} read by row"
    type_k, type_v = _types(cache)
    if plan.adapters:
        adapters = counted(len(llm.lora_adapters), "adapter")
        weights += f", {adapters} {byte_size(plan.adapters)}"
    rows = f"K {type_k} {byte_size(plan.cache_k)}, V {type_v} "
    if keeps_latents(llm.config.groups):
        rows = f"latents (K and V) {cache.type_k} {byte_size(plan.cache_k)}, "
        rows += f"rotated keys {cache.type_k_rope} "
    rows += f"{byte_size(plan.cache_v)}"
    if cache.kv_budget is not None:
        rows = f"{cache_types(llm)} in {byte_size(plan.cache_k + plan.cache_v)}"
    rows = "no cache" if llm.config.is_encoder else rows
    return (
        f"memory: weights {weights}, {rows}, {_states(plan)}"
        f"scratch {byte_size(plan.scratch)} (context {cache.n_ctx}{_windows(plan, cache.n_ctx)})"
        + (f", on {llm.backend.hardware}" if llm.backend.hardware else "")
        + "".join(f"; {line}" for line in place_parts(llm))
        + (f"; {draft_part(plan.draft, llm.draft)}" if llm.draft and plan.draft else "")
    )


def place_parts(llm: LLM) -> list[str]:
    """What each device has, where there are several, with its bytes."""
    if not llm.memory.places:
        return []
    words = llm.places.placement.in_words(llm.config)
    return [
        f"{line} ({byte_size(plan.resident)} and {byte_size(plan.weights_mapped)} mapped)"
        if plan.weights_mapped
        else f"{line} ({byte_size(plan.total)})"
        for line, (_, plan) in zip(words, llm.memory.places, strict=True)
    ]


def draft_part(plan: MemoryPlan, draft: LLM) -> str:
    """The memory of the model that drafts."""
    return (
        f"draft {draft.config.name or draft.gguf.path.stem}: weights {byte_size(plan.weights)}, "
        f"{cache_types(draft)} {byte_size(plan.cache_k + plan.cache_v)}, "
        f"scratch {byte_size(plan.scratch)}"
    )


def cache_types(llm: LLM) -> str:
    """How rows of the cache are stored, "K q8_0, V q4_0"."""
    cache = llm.cache
    if keeps_latents(llm.config.groups):
        return f"latents {cache.type_k}, rotated keys {cache.type_k_rope}"
    if cache.kv_budget is not None:
        return f"K/V {ladder_text(cache.kv_ladder)}"
    type_k, type_v = _types(cache)
    return f"K {type_k}, V {type_v}"


def _types(cache: CacheConfig) -> Iterator[str]:
    """The types of K and V: "f16", or "f16 (windows q8_0)" if layers with a window have others."""
    of_windows = cache.type_k_swa, cache.type_v_swa
    for name, other in zip(cache.shown_types, of_windows, strict=True):
        yield name if other in (None, name) else f"{name} (windows {other})"


def _windows(plan: MemoryPlan, n_ctx: int) -> str:
    """In words, the layers that keep less than the context, and how many tokens they keep."""
    fewer = dict[tuple[int, int], int]()
    for group in plan.groups:
        if group.n_rows < n_ctx:
            kind = group.window, group.n_rows
            fewer[kind] = fewer.get(kind, 0) + group.layers
    return "".join(
        f", where {counted(layers, 'layer')} with a window of {window} "
        f"{'keep' if layers > 1 else 'keeps'} {n_rows}"
        for (window, n_rows), layers in fewer.items()
    )


def groups_json(plan: MemoryPlan) -> list[dict[str, Any]]:
    """The groups of layers that the cache has, for `--json`."""
    return [asdict(group) for group in plan.groups]


def _states(plan: MemoryPlan) -> str:
    """What recurrent layers take, if there are some."""
    if not plan.states:
        return ""
    kept = f" + {byte_size(plan.checkpoints)} of checkpoints" if plan.checkpoints else ""
    return f"states {byte_size(plan.states)}{kept}, "


def memory_bytes(plan: MemoryPlan) -> str:
    """The memory to the byte."""
    by_row = f" and {plan.weights_by_row} read by row" if plan.weights_by_row else ""
    decoded = f", {plan.weights_decoded} decoded to float32" if plan.weights_decoded else ""
    return (
        f"weights {plan.weights} ({plan.weights_mapped} mapped{decoded}){by_row}, "
        + (f"adapters {plan.adapters}, " if plan.adapters else "")
        + f"K {plan.cache_k}, V {plan.cache_v}, "
        + (f"states {plan.states}, checkpoints {plan.checkpoints}, " if plan.states else "")
        + f"scratch {plan.scratch} bytes"
        + (f"; draft {memory_bytes(plan.draft)}" if plan.draft else "")
    )


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """Its part of `--json`; the cache's groups are in another."""
    sizes = asdict(replace(plan, draft=None))
    del sizes["groups"], sizes["draft"], sizes["places"]
    draft = {} if plan.draft is None else {"draft": memory_json(plan.draft)}
    places = {device: memory_json(own) for device, own in plan.places}
    return {**sizes, **draft, **({"places": places} if places else {}), "total": plan.total}
