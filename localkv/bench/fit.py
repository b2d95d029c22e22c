"""Whether all caches of a grid fit in memory, as `LLM` finds out for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localkv.arch.placement import Offload
from localkv.bench.grid import Grid
from localkv.bench.parallel import ParallelTest
from localkv.bench.source import Source
from localkv.cache.cache_checks import check_cache
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.select import first_device, gpu_names, select_backend
from localkv.memory.fit import check_fit, check_parts_fit, free_memory, free_on, in_places
from localkv.memory.plan import ModelMemory
from localkv.system.threads import n_threads


def check_grid(
    source: Source, grid: Grid, device: str, like: CacheConfig, offload: Mapping[str, Any]
) -> list[str]:
    """Refuse a grid if any of its caches does not fit, before anything is allocated.

    Args:
        like: all caches are so, but for their types and sizes.
        offload: the arguments of `LLM` that divide a model over devices.

    Returns:
        warnings: settings that fit only without all of the mapped weights, each once.

    Raises:
        UsageError: a cache type can't be used with this model.
        DoesNotFitError: names settings that would fit.
    """
    sizes = (max((test.n_ctx for test in grid.tests(depth)), default=0) for depth in grid.n_depth)
    caches = [replace(like, n_ctx=n_ctx) for n_ctx in sizes if n_ctx]
    return _check(source, grid, device, caches, offload)


def check_parallel(
    tests: Sequence[ParallelTest],
    source: Source,
    grid: Grid,
    device: str,
    like: CacheConfig,
    offload: Mapping[str, Any],
) -> list[str]:
    """Refuse tests with many sequences if a cache of theirs does not fit, as `check_grid` does."""
    return _check(source, grid, device, [test.cache(like) for test in tests], offload)


def _check(
    source: Source, grid: Grid, device: str, caches: Sequence[CacheConfig], given: Mapping[str, Any]
) -> list[str]:
    gpus = gpu_names(device, given["main_gpu"])
    backend, offload = (
        select_backend(first_device(device, given["main_gpu"])),
        Offload.of_arguments(given),
    )
    budget = free_memory(backend)
    is_divided = backend.name != "cpu" and (len(gpus) > 1 or not offload.is_auto)
    if is_divided and source.path is None:
        raise UsageError(
            "a shape runs in one place", hint="leave out -ngl and the like, or measure a file"
        )
    warnings = []
    for setting in grid.settings():
        memory = ModelMemory(
            source.tensors,
            source.config,
            backend.name,
            setting.n_evaluated,
            max(setting.n_threads or n_threads(), setting.n_threads_batch or 0),
            is_file=source.path is not None,
        )
        for made in caches:
            cache = replace(made, type_k=setting.type_k, type_v=setting.type_v)
            check_cache(cache, source.config.groups)
            if is_divided:
                budgets = free_on(gpus, backend)
                placed, _ = in_places(memory, cache, offload, gpus, budgets)
                check_parts_fit(placed, cache, budgets)
                continue
            if budget and (warning := check_fit(memory, cache, budget, has_ctx=False)):
                warnings.append(warning)
    return list(dict.fromkeys(warnings))
