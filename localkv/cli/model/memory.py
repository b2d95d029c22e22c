"""The memory of a loaded model, as a line for people and to the byte for programs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from localkv.cache.cache_checks import keeps_latents
from localkv.cache.ladder import ladder_text
from localkv.errors import byte_size, counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from localkv.config import CacheConfig
    from localkv.llm import LLM
    from localkv.memory.plan import MemoryPlan


def memory_line(llm: LLM) -> str:
    """One line: weights (mapped from the file, allocated, or both), K, V, scratch; the GPU."""
    plan, cache = llm.memory, llm.cache
    if plan.weights_mapped == 0:
        weights = f"{byte_size(plan.weights)} allocated"
    elif plan.weights_allocated == 0:
        weights = f"{byte_size(plan.weights)} mapped"
    else:
        weights = f"{byte_size(plan.weights)} ({byte_size(plan.weights_mapped)} mapped)"
    if plan.weights_by_row:
        weights += f" besides {byte_size(plan.weights_by_row)} read by row"
    type_k, type_v = _types(cache)
    rows = f"K {type_k} {byte_size(plan.cache_k)}, V {type_v} "
    if keeps_latents(llm.config.groups):
        rows = f"latents (K and V) {cache.type_k} {byte_size(plan.cache_k)}, "
        rows += f"rotated keys {cache.type_k_rope} "
    rows += f"{byte_size(plan.cache_v)}"
    if cache.kv_budget is not None:
        rows = f"{cache_types(llm)} in {byte_size(plan.cache_k + plan.cache_v)}"
    return (
        f"memory: weights {weights}, {rows}, {_states(plan)}"
        f"scratch {byte_size(plan.scratch)} (context {cache.n_ctx}{_windows(plan, cache.n_ctx)})"
        + (f", on {llm.backend.hardware}" if llm.backend.hardware else "")
        + (f"; {draft_part(plan.draft, llm.draft)}" if llm.draft and plan.draft else "")
    )


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
    """Of K and of V: "f16", or "f16 (windows q8_0)" where layers with a window have their own."""
    of_windows = cache.type_k_swa, cache.type_v_swa
    for name, other in zip(cache.shown_types, of_windows, strict=True):
        yield name if other in (None, name) else f"{name} (windows {other})"


def _windows(plan: MemoryPlan, n_ctx: int) -> str:
    """Which layers keep less than the context, and how many tokens."""
    fewer = dict[tuple[int, int], int]()
    for group in plan.groups:
        if group.n_rows < n_ctx:
            kind = group.window, group.n_rows
            fewer[kind] = fewer.get(kind, 0) + group.layers
    return "".join(
        f", of which {counted(layers, 'layer')} with a window of {window} "
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
    """The same to the byte."""
    by_row = f" besides {plan.weights_by_row} read by row" if plan.weights_by_row else ""
    return (
        f"weights {plan.weights} ({plan.weights_mapped} mapped){by_row}, K {plan.cache_k}, "
        f"V {plan.cache_v}, "
        + (f"states {plan.states}, checkpoints {plan.checkpoints}, " if plan.states else "")
        + f"scratch {plan.scratch} bytes"
        + (f"; draft {memory_bytes(plan.draft)}" if plan.draft else "")
    )


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """Its part of `--json`; the cache's groups are in another."""
    sizes = asdict(replace(plan, draft=None))
    del sizes["groups"], sizes["draft"]
    draft = {} if plan.draft is None else {"draft": memory_json(plan.draft)}
    return {**sizes, **draft, "total": plan.total}
