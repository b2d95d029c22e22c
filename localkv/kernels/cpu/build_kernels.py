"""Compile the kernels that the package carries, so that few first starts compile any.

    python -m localkv.kernels.cpu.build_kernels            for this CPU's level
    python -m localkv.kernels.cpu.build_kernels --all      for all levels of this architecture

`carried_sources` lists them: what published files of the usual weight types take, with the cache
types of the presets, of the default ladder and of the usual pairs. Everything else is compiled when
it is first needed. What is already there is kept, and what the sources no longer make is dropped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from localkv.arch.spec import MlpSpec
from localkv.cache.ladder import DEFAULT_LADDER
from localkv.config import USUAL_PAIRS, preset_pairs
from localkv.errors import byte_size, counted
from localkv.kernels.cpu.attention.kernels import (
    MAX_ROWS,
    decode_k_source,
    decode_v_source,
    runs_in_blocks,
    score_source,
    weigh_source,
)
from localkv.kernels.cpu.attention.latent_attention import latents_source
from localkv.kernels.cpu.cpu_backend import KEPT_SUMS
from localkv.kernels.cpu.jit.carried_kernels import archive_path, carried, write_archive
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.machine_code import pack
from localkv.kernels.cpu.layers.chains import ACTIVATIONS, RESIDUALS, ROW_STEPS, activate_source
from localkv.kernels.cpu.layers.latents import LATENT_STEPS
from localkv.kernels.cpu.layers.program import GUESS
from localkv.kernels.cpu.linear.embedding import embedding_source
from localkv.kernels.cpu.linear.late_panels import LATE_PRODUCTS
from localkv.kernels.cpu.linear.matrices import product_sources
from localkv.kernels.cpu.linear.products import LOW_RANK, head_source
from localkv.kernels.cpu.moe.experts import ROWS
from localkv.kernels.cpu.recurrent.steps import OUTPUT, conv_source
from localkv.kernels.cpu.runtime.thread_pool import HELPERS
from localkv.kernels.cpu.store.store_kv import group_source, store_source
from localkv.quant_formats import FORMATS
from localkv.simd.cpu_features import CPU_LEVEL, CPU_VARIABLE, LEVELS, NATIVE
from localkv.system.processor import usable_cores

WEIGHT_TYPES = (
    *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "iq4_nl", "iq4_xs", "mxfp4"),
)
"""Types in published files of Q2_K to Q6_K, Q4_0 to Q8_0, IQ4_XS, MXFP4, F16 and BF16. A mixture
takes Q4_0, Q5_0, Q8_0 or IQ4_NL for rows that are no multiple of 256 values."""

LATENT_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_0", "q4_K", "q5_K", "q6_K")
"""Types of the matrices of latent attention's heads."""
LATENT_HEADS = (16, 20, 128)
"""DeepSeek V2 Lite, GLM 4.7 Flash, DeepSeek V3."""
GATINGS = ("softmax", "sigmoid", "softmax_of_chosen")
CONVOLUTIONS = (3, 4)
"""Tokens: LFM2's, and the ones of Mamba 2 and the gated delta net."""
STATE_VECTORS = (4, 8)
"""Vectors of a recurrent head of 64 and of 128 channels."""


def carried_sources() -> list[KernelSource]:
    """The kernels that the package carries, each once."""
    parts = (_common_sources(), _weight_sources(), _cache_sources(), _latent_sources())
    return list(dict.fromkeys(source for part in parts for source in part))


def _common_sources() -> Iterator[KernelSource]:
    yield from (HELPERS, ACTIVATIONS, RESIDUALS, ROW_STEPS, LATE_PRODUCTS, GUESS, KEPT_SUMS, ROWS)
    yield LOW_RANK
    for template in ("linear/fill", "attention/prefill", "attention/decode", "store/rotate_rows"):
        yield KernelSource(template)
    for gating in GATINGS:
        yield KernelSource("moe/route", {"GATING": gating})
    yield activate_source(MlpSpec(0, "relu2", gated=False))
    yield activate_source(MlpSpec(0, "swiglu_oai"))
    yield OUTPUT
    yield from map(conv_source, CONVOLUTIONS)
    for predicts in (True, False):
        for vectors in STATE_VECTORS:
            parameters = {"PREDICTS": predicts, "VECTORS": vectors}
            yield KernelSource("recurrent/scan", parameters)
    by_channel = {"PREDICTS": True, "VECTORS": STATE_VECTORS[0], "BY_CHANNEL": True}
    yield KernelSource("recurrent/scan", by_channel)


def _weight_sources() -> Iterator[KernelSource]:
    for name in WEIGHT_TYPES:
        yield from product_sources(name)
        if (source := embedding_source(name)) is not None:
            yield source


def _cache_sources() -> Iterator[KernelSource]:
    pairs = [*USUAL_PAIRS, *preset_pairs(), *DEFAULT_LADDER]
    if any(runs_in_blocks(*pair) for pair in pairs):
        yield KernelSource("attention/many")
    for pair in pairs:
        by_channel = any(FORMATS[name].group_tokens > 1 for name in pair)
        for side, name in zip("kv", pair, strict=True):
            fmt = FORMATS[name]
            yield group_source(fmt, side) if by_channel else store_source(fmt)
            yield decode_k_source(name) if side == "k" else decode_v_source(name)
            for rows in range(1, MAX_ROWS + 1):
                yield score_source(name, rows) if side == "k" else weigh_source(name, rows)


def _latent_sources() -> Iterator[KernelSource]:
    yield LATENT_STEPS
    yield from map(latents_source, LATENT_HEADS)
    yield from map(head_source, LATENT_TYPES)
    yield group_source(FORMATS["f16"], "v")  # keys with RoPE beside latents by channel


def _compiled(source: KernelSource) -> bytes:
    return pack(source.carried_name, source.compile())


def build(n_jobs: int) -> int:
    """Write the archive of this process's level; the number of kernels that were compiled.

    Raises:
        OSError: it can't be written.
    """
    sources = {source.carried_name: source for source in carried_sources()}
    kernels = {name: data for name in sources if (data := carried(name)) is not None}
    missing = [source for name, source in sources.items() if name not in kernels]
    with ProcessPoolExecutor(n_jobs, get_context("spawn")) as pool:
        for i, (source, data) in enumerate(
            zip(missing, pool.map(_compiled, missing), strict=True), 1
        ):
            kernels[source.carried_name] = data
            if sys.stderr.isatty():
                text = f"\rcompiling kernels for {CPU_LEVEL}: {i} of {len(missing)}"
                print(text, end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty() and missing:
        print(file=sys.stderr)
    path = archive_path()
    write_archive(path, kernels)
    n_kernels, size = counted(len(kernels), "kernel"), byte_size(path.stat().st_size)
    print(f"{CPU_LEVEL}: {n_kernels}, {len(missing)} compiled now, {size}")
    return len(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the archive of one level here, and of each of several in a process of its own: kernels
    are compiled for the level that a process begins with."""
    parser = argparse.ArgumentParser(
        prog="python -m localkv.kernels.cpu.build_kernels",
        description="Compile the kernels that the package carries.",
    )
    parser.add_argument("--all", action="store_true", help="for all levels of this architecture")
    parser.add_argument("-j", type=int, default=usable_cores(), help="processes (default: cores)")
    options = parser.parse_args(arguments)
    if options.all:
        command = [sys.executable, "-m", "localkv.kernels.cpu.build_kernels", "-j", str(options.j)]
        for level in LEVELS:
            subprocess.run(command, env={**os.environ, CPU_VARIABLE: level}, check=True)
        return 0
    asked = os.environ.get(CPU_VARIABLE) or NATIVE
    if asked not in (NATIVE, *LEVELS):
        parser.error(f"{CPU_VARIABLE}={asked} is no level of this machine: {', '.join(LEVELS)}")
    if CPU_LEVEL == NATIVE:
        print(
            "nothing to build: kernels are compiled for this CPU alone, not for one of the levels "
            f"{', '.join(LEVELS)}"
        )
        return 0
    build(options.j)
    return 0


if __name__ == "__main__":
    sys.exit(main())
