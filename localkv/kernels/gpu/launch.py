"""Launches of kernels; or, ahead of them, what compiles them, on all cores at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import triton

from localkv.processor import usable_cores

_ahead: ContextVar[bool] = ContextVar("ahead", default=False)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    enable_fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """`kernel[grid](*args, **constants)`; within `compile_together`, its compilation begins.

    Args:
        enable_fp_fusion: a multiplication and an addition may be rounded once. Triton's default
            depends on its version.
    """
    constants["enable_fp_fusion"] = enable_fp_fusion
    if _ahead.get():
        kernel.warmup(*args, grid=grid, **constants)
    else:
        kernel[grid](*args, **constants)


def compile_together(run: Callable[[], None]) -> None:
    """Compile the kernels that `run` launches, several at a time.

    None of them runs, so `run` must do without their results, which are whatever was in memory.
    Most of a compilation is done by LLVM and ptxas, where threads don't wait for each other.
    """

    def ahead() -> None:
        _ahead.set(True)
        with ThreadPoolExecutor(usable_cores()) as pool:
            try:
                with triton.AsyncCompileMode(pool):
                    run()
            except BaseException:  # Ctrl-C too: what has not begun need not be waited for
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    copy_context().run(ahead)
