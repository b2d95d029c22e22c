"""A finished test as a row, with llama-bench's columns first, and the machine that it ran on."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localkv import __version__
from localkv.bench.grid import BenchTest, Setting
from localkv.bench.source import Source
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.linear.arena import PanelArena
from localkv.system.threads import Threads, n_threads, placement

Value = str | int | float | bool


@dataclass(frozen=True)
class Machine:
    """Where it ran.

    Attributes:
        cpu, gpu: their names; no GPU is "".
        backend: as `--device` names it.
        device: the value of `--device`.
        attention, linear: the implementations of attention and products.
        n_gpu_layers: the layers that are on GPUs, and the output as one more.
    """

    cpu: str
    gpu: str
    backend: str
    device: str
    attention: str
    linear: str
    n_gpu_layers: int = 0


@dataclass(frozen=True)
class Result:
    """A test, its settings, and its measurements.

    Attributes:
        threads: of the CPU, for one token and for several.
        test_time: when it began, UTC, RFC 3339.
        samples_ns: nanoseconds of each repetition.
        n_ctx: tokens that the cache holds.
        kv_bytes: the bytes allocated for K and V.
        peak_bytes: the most memory taken during the test (`PeakMemory`).
        bytes_per_token: moved at least (`traffic.py`).
        bandwidth: of the memory, bytes per second, measured in the same run.
    """

    source: Source
    machine: Machine
    setting: Setting
    test: BenchTest
    threads: Threads
    test_time: str
    samples_ns: tuple[int, ...]
    n_ctx: int
    kv_bytes: int
    peak_bytes: int
    bytes_per_token: float
    bandwidth: float

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [1e9 * self.test.n_tokens / ns for ns in self.samples_ns]

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _deviation(self.samples_ts)

    @property
    def roofline(self) -> float:
        """Share of the bandwidth that the bytes moved amount to; 1 is all of it."""
        return self.bytes_per_token * self.avg_ts / self.bandwidth

    def llama_bench_values(self) -> dict[str, Value]:
        """llama-bench's columns, in its order.

        Columns of features that localkv lacks hold the equivalent value: all layers on one device,
        no thread polling, nothing fitted.
        """
        source, setting, test = self.source, self.setting, self.test
        return {
            "build_commit": __version__,
            "build_number": 0,
            "cpu_info": self.machine.cpu,
            "gpu_info": self.machine.gpu,
            "backends": self.machine.backend.upper(),
            "model_filename": source.name,
            "model_type": source.kind,
            "model_size": source.n_bytes,
            "model_n_params": source.n_params,
            "n_batch": setting.n_batch,
            "n_ubatch": setting.n_ubatch,
            "n_threads": self.threads.one,
            "cpu_mask": placement().mask,
            "cpu_strict": placement().strict,
            "poll": 0,
            "type_k": setting.type_k,
            "type_v": setting.type_v,
            "n_gpu_layers": self.machine.n_gpu_layers,
            "n_cpu_moe": 0,
            "split_mode": "none",
            "main_gpu": 0,
            "no_kv_offload": False,
            "flash_attn": int(self.machine.backend != "reference"),
            "devices": self.machine.device,
            "tensor_split": "0.00",
            "tensor_buft_overrides": "none",
            "load_mode": "none" if source.path is None else "mmap",
            "embeddings": False,
            "no_op_offload": 0,
            "no_host": False,
            "fit_target": 0,
            "fit_min_ctx": 0,
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
            "n_depth": test.n_depth,
            "test_time": self.test_time,
            "avg_ns": round(statistics.fmean(self.samples_ns)),
            "stddev_ns": round(_deviation(self.samples_ns)),
            "avg_ts": self.avg_ts,
            "stddev_ts": self.stddev_ts,
        }

    def own_values(self) -> dict[str, Value]:
        """The columns that llama-bench has not: bytes, bytes per second, and a share of 1."""
        return {
            "n_threads_batch": self.threads.several,
            "n_ctx": self.n_ctx,
            "kv_bytes": self.kv_bytes,
            "peak_bytes": self.peak_bytes,
            "bytes_per_token": self.bytes_per_token,
            "bandwidth": self.bandwidth,
            "roofline": self.roofline,
            "attention_kernel": self.machine.attention,
            "linear_kernel": self.machine.linear,
        }


def _deviation(samples: list[float] | tuple[int, ...]) -> float:
    """The standard deviation of samples; 0 if there is only one."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


CPU_BUFFER, GPU_BUFFER = 512 << 20, 1 << 30
"""Bytes that are read, or copied, to measure bandwidth: more than any cache holds."""
ROUNDS = 6
"""Times it is measured; the best counts, as other programs only take bandwidth away."""


def bandwidth(backend: Backend, n_bytes: int | None = None) -> float:
    """Bytes per second: on a CPU of a read by all threads, on a GPU of a copy, both ways.

    Args:
        n_bytes: size of the buffer; None is one that no cache holds.
    """
    if backend.memory is not None:
        copied = n_bytes or GPU_BUFFER
        return 2 * copied / backend.memory.copy_seconds(copied)
    # memory as weights have it
    values = PanelArena().take(n_bytes or CPU_BUFFER).view(np.int64)
    values.fill(1)
    parts = np.array_split(values, n_threads())
    with ThreadPoolExecutor(len(parts)) as pool:
        return values.nbytes / _shortest(lambda: list(pool.map(np.sum, parts)))


def _shortest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


class PeakMemory:
    """The most memory that is taken from when this was made: the GPU's, or this process'.

    The process' peak is the system's count of resident bytes: Python, libraries and the pages of a
    mapped file are part of it. Where the system can't forget an earlier peak, that one counts.
    """

    def __init__(self, backend: Backend) -> None:
        self.memory = backend.memory
        if self.memory is not None:
            self.memory.reset_peak()
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")

    def n_bytes(self) -> int:
        return _peak_resident() if self.memory is None else self.memory.peak()


def _peak_resident() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        import resource

        # kilobytes, except on macOS
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
