"""Rows of queries on their way into the CPU's attention workers, and of outputs on their way out.

A row is one new token and one query head of the KV head at hand.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from localkv.kernels.cpu.attention_job import SOFTCAP, SOFTMAX_SCALE
from localkv.kernels.cpu.softmax import ONE, ZERO, log_sum_exp, query_factor
from localkv.simd.arithmetic import f32x16, mul, zero_f32
from localkv.simd.memory import get_f32, load_f32, put_f32, store_f32
from localkv.simd.vector import LANES


@njit
def softcap_of(address: Any) -> Any:
    """The soft cap of the job at an address."""
    return get_f32(address, SOFTCAP * 2)


@njit
def row_index(job: Any, token: int, head: int, row: int) -> Any:
    """Which of q's [tokens * n_heads] rows is row `row`, counted from a token and a KV head."""
    return ((token + row // job.group) * job.n_kv_heads + head) * job.group + row % job.group


@njit
def gather_queries(
    address: Any, job: Any, q: Any, token: int, head: int, n_rows: int, n_padded: int
) -> None:
    """q [n_padded, head_dim]: scaled rows, zeros behind them."""
    factor = f32x16(query_factor(get_f32(address, SOFTMAX_SCALE * 2), softcap_of(address)))
    for row in range(n_padded):
        source = row_index(job, token, head, row) * job.head_dim
        for c in range(0, job.head_dim, LANES):
            x = zero_f32()
            if row < n_rows:
                x = mul(load_f32(job.q, source + c), factor)
            store_f32(q, row * job.head_dim + c, x)


@njit
def put_output(job: Any, at: int, row: Any, reference: Any, total: Any) -> None:
    """Output and log-sum-exp of row `at` of q; 0 and minus infinity if it saw nothing."""
    factor = ZERO
    if total > ZERO:
        factor = ONE / total
    for c in range(0, job.head_dim, LANES):
        store_f32(job.out, at * job.head_dim + c, mul(load_f32(row, c), f32x16(factor)))
    put_f32(job.lse, at, log_sum_exp(reference, total))
