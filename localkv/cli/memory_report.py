"""The memory of a loaded model, as a line for people and to the byte for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from localkv.errors import byte_size

if TYPE_CHECKING:
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
    return (
        f"memory: weights {weights}, K {cache.type_k} {byte_size(plan.cache_k)}, "
        f"V {cache.type_v} {byte_size(plan.cache_v)}, scratch {byte_size(plan.scratch)} "
        f"(context {cache.n_ctx})"
        + (f", on {llm.backend.hardware}" if llm.backend.hardware else "")
    )


def memory_bytes(plan: MemoryPlan) -> str:
    """The same to the byte."""
    return (
        f"weights {plan.weights} ({plan.weights_mapped} mapped), K {plan.cache_k}, "
        f"V {plan.cache_v}, scratch {plan.scratch} bytes"
    )


def memory_json(plan: MemoryPlan) -> dict[str, int]:
    """Its part of `--json`; the cache's groups are in another."""
    sizes = asdict(plan)
    del sizes["groups"]
    return {**sizes, "total": plan.total}
