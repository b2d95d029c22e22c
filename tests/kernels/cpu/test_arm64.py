"""Kernels compiled for 64-bit ARM, whatever the CPU at hand: what they want of others and hold.

`make test-arm64` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from localkv.kernels.cpu.attention.kernels import (
    decode_k_source,
    decode_v_source,
    score_source,
    weigh_source,
)
from localkv.kernels.cpu.jit import kernel_source, machine_code
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from support import cross_compiler

KNOWN = {
    machine_code.FAILED,
    "_GLOBAL_OFFSET_TABLE_",
    "clock_gettime",
    "exp2f",
    "log2f",
    "memcpy",
    "memmove",
    "memset",
    "sched_yield",
    "syscall",
}
"""Symbols of the system's libraries, which every process has."""


def product(name: str) -> KernelSource:
    return KernelSource("linear/product", {"FORMAT": name})


def templates() -> list[KernelSource]:
    """All of them, with the parameters that they say."""
    folder = kernel_source.PACKAGE / "kernels/cpu"
    paths = [path for path in sorted(folder.rglob("*.py")) if "\n@cfunc" in path.read_text()]
    return [KernelSource(path.relative_to(folder).with_suffix("").as_posix()) for path in paths]


def of_caches(names: Iterable[str]) -> list[KernelSource]:
    """Attention's of some types; the rest of it is the same for all."""
    sources = list[KernelSource]()
    for name in names:
        for source in (score_source(name, 4), weigh_source(name, 4)):
            elsewhere = {**source.parameters, "DIGITS": False}  # they are of AVX-512
            sources.append(KernelSource(source.template, elsewhere))
        sources += [decode_k_source(name), decode_v_source(name)]
    return sources


def compiled(cpu: dict[str, str], sources: Iterable[KernelSource]) -> list[dict[str, Any]]:
    """What is said of each, whose symbols are known."""
    requests = [json.dumps([source.template, dict(source.parameters)]) for source in sources]
    done = subprocess.run(
        [sys.executable, str(Path(cross_compiler.__file__))],
        env={**os.environ, **cpu, "PYTHONPATH": os.pathsep.join(sys.path)},
        input="\n".join(requests) + "\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests)
    assert set[str]().union(*(answer["symbols"] for answer in answers)) <= KNOWN
    return answers


@pytest.mark.parametrize(
    ("cpu", "instructions"),
    [
        (cross_compiler.NEOVERSE_N1, {"q4_0": "sdot"}),
        pytest.param(
            cross_compiler.NEOVERSE_V1, {"q4_0": "usdot", "q8_0": "sdot"}, marks=pytest.mark.slow
        ),
        pytest.param(cross_compiler.CORTEX_A72, {"q4_0": "fmla"}, marks=pytest.mark.slow),
    ],
    ids=["Neoverse N1", "Neoverse V1", "Cortex A72"],
)
def test_products_of_bytes(cpu: dict[str, str], instructions: dict[str, str]) -> None:
    """They are dot products where the CPU has them; the rest are products of floats."""
    answers = compiled(cpu, map(product, instructions))
    for answer, instruction in zip(answers, instructions.values(), strict=True):
        found = answer["instructions"]
        assert found[instruction] > 400
        assert bool(found.keys() & {"sdot", "usdot"}) == (instruction != "fmla")


@pytest.mark.slow
@pytest.mark.long
def test_all_kernels() -> None:
    sources = [*templates(), product("q8_0"), *of_caches(["q4_0"])]
    for source, answer in zip(sources, compiled(cross_compiler.NEOVERSE_N1, sources), strict=True):
        if source.template == "linear/product":
            assert answer["instructions"]["sdot"] > 400, source


@pytest.mark.exhaustive
def test_other_types() -> None:
    sources = [product("iq4_nl"), *of_caches(["f16", "q8_0", "iq4_nl"])]
    compiled(cross_compiler.NEOVERSE_N1, sources)
