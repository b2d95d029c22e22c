"""Launches of kernels; or, ahead of them, their compilation on all cores at the same time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import triton

from localkv.kernels.gpu.device import what_is_missing
from localkv.system.processor import usable_cores

_ahead: ContextVar[set[Any] | None] = ContextVar("ahead", default=None)
"""Within `compile_together`, the kernels whose compilation has begun."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, enable_fp_fusion: bool = True, **constants: Any
) -> None:
    """`kernel[grid](*args, **constants)`; within `compile_together`, its compilation begins.

    Args:
        enable_fp_fusion: a multiplication and an addition may be rounded once. Triton's default
            depends on its version.

    Raises:
        LocalKVError: a C compiler or Python's headers are missing.
    """
    constants["enable_fp_fusion"] = enable_fp_fusion
    kernels = _ahead.get()
    if kernels is not None:
        kernels.add(kernel)
        kernel.warmup(*args, grid=grid, **constants)
        return
    try:
        kernel[grid](*args, **constants)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        if problem := what_is_missing(error):
            raise problem from error
        raise


def compile_together(run: Callable[[], None]) -> None:
    """Compile the kernels that `run` launches, several at a time.

    None of them runs, so `run` must do without their results, which are random memory.
    Most of a compilation is done by LLVM and ptxas, where threads don't wait for each other. Errors
    of the compiler show when a kernel is launched.
    """

    def ahead() -> None:
        kernels: set[Any] = set()
        _ahead.set(kernels)
        with ThreadPoolExecutor(usable_cores()) as pool:
            try:
                with triton.AsyncCompileMode(pool, ignore_errors=True):
                    run()
            except BaseException:  # Ctrl-C too
                pool.shutdown(wait=False, cancel_futures=True)
                for (
                    kernel
                ) in kernels:  # Triton keeps failed compilations as if they were still to come
                    kernel.device_caches.clear()
                raise

    copy_context().run(ahead)
