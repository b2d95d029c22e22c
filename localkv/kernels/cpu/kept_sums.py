"""`kept_sums` by a compiled kernel, on all threads."""

from __future__ import annotations

from array import array

import numpy as np

from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.addresses import address
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.row_operations import MANY_VALUES
from localkv.kernels.cpu.runtime.thread_pool import run_worker
from localkv.kernels.kept_sums import Kept, KeptSums, Logits
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads

KEPT_SUMS = KernelSource("linear/kept_sums")
RESULTS = 9
"""Floats that the kernel leaves of a row."""


def kept_sums_cpu(logits: Logits, kept: Kept) -> KeptSums:
    """See `kept_sums`.

    Raises:
        BoundsError: the kept tokens are not those of such logits.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    n_rows, n_vocab = logits.shape
    ids, shifted, starts = (
        np.ascontiguousarray(part, kind)
        for part, kind in zip(kept, (np.int32, np.float32, np.int64), strict=True)
    )
    _check(n_rows, n_vocab, Kept(ids, shifted, starts))
    threads = n_threads() if logits.size >= MANY_VALUES else 1
    weights = np.empty(threads * (n_vocab + -n_vocab % LANES), np.float32)
    best, out = np.empty(n_rows, np.int64), np.empty((n_rows, RESULTS), np.float32)
    memory = (logits, ids, shifted, starts, weights, best, out)
    job = array("q", (0, n_rows, n_vocab, *map(address, memory)))
    run_worker(specialized(KEPT_SUMS)["worker"], job.buffer_info()[0], threads)
    sums = out[:, 1::2].astype(np.float64) + out[:, 2::2]
    return KeptSums(best, out[:, 0], *sums.T)


def _check(n_rows: int, n_vocab: int, kept: Kept) -> None:
    ids, shifted, starts = kept
    if len(starts) != n_rows + 1 or starts[0] != 0 or (np.diff(starts) < 0).any():
        raise BoundsError(f"kept tokens of {len(starts) - 1} rows, not {n_rows}")
    if not starts[-1] == len(ids) == len(shifted):
        raise BoundsError(f"{len(ids)} kept tokens with {len(shifted)} logits")
    if len(ids) and not 0 <= ids.min() <= ids.max() < n_vocab:
        raise BoundsError(f"kept tokens from {ids.min()} to {ids.max()} of {n_vocab}")
