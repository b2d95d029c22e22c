"""Compile a Triton kernel for any NVIDIA GPU, without one, and say what its machine code does."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localkv.quant_formats import FORMATS
from support.quick import in_turn, quick

ARCHS = (80, 86, 89, 90, 100, 120)
"""Compute capabilities: A100, RTX 30, RTX 40, H100, B200, RTX 50."""
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What a block may take, by compute capability."""


def gpus_in_turn(
    arguments: str, cases: Sequence[Any], gpus: Sequence[int] = ARCHS
) -> pytest.MarkDecorator:
    """One case after the other, each on the next of the GPUs; when time is short, what falls to 90;
    all on each is exhaustive. A case that is a tuple is several arguments."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    some = [(gpu, *row) for gpu, row in in_turn(gpus, rows)]
    every = [(gpu, *row) for gpu, row in product(gpus, rows)]
    few = [case for case in some if case[0] == 90]
    return pytest.mark.parametrize(f"arch,{arguments}", quick(every, few, some))


def types_on_gpus(
    names: Sequence[str], gpus: Sequence[int] = (), everywhere: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Each type on one GPU, and on each GPU one of the types that are alike, in turn; those that
    fall to 90 when time is short.

    Exhaustive are all on 90, every second one on each of `gpus`, and `everywhere` on each GPU.
    80 and 89 have 86's instructions, and 89 also has instructions that convert fp8.
    """
    alike: dict[object, list[str]] = {}
    for name in names:
        fmt = FORMATS[name]
        kind = (fmt.n_centroids > 0, fmt.shares_scale, fmt.largest > 0)
        alike.setdefault(kind, []).append(name)
    some = {pair for kind in alike.values() for pair in in_turn(ARCHS, kind)}
    others = [arch for arch in gpus if arch != 90]
    every = [
        (arch, name)
        for arch in ARCHS
        for at, name in enumerate(names)
        if (arch, name) in some
        or arch == 90
        or name in everywhere
        or (arch in others and at % 2 == others.index(arch) % 2)
    ]
    few = {(arch, name) for arch, name in some if arch == 90}
    return pytest.mark.parametrize(("arch", "name"), quick(every, few, some))


TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BYTES = {"128": 16, "64": 8, "32": 4, "U16": 2, "S16": 2, "U8": 1, "S8": 1}

_RECORDED_WITH = triton.__version__.startswith("3.7.")
BUDGET_FACTOR = 1.0 if _RECORDED_WITH else 1.75
"""Budgets of instructions were recorded with Triton 3.7; others compile products of tensor cores to
more."""
ONE_TOKEN_FACTOR = 1.0 if _RECORDED_WITH else 1.15
"""The factor for products with one token."""
ATTENTION_FACTOR = 1.0 if _RECORDED_WITH else 1.35
"""The factor for attention."""
MOST_SPILLS = 0 if _RECORDED_WITH else 1
"""Accesses to local memory in a loop that isn't a product's. Decoding q4_1 on sm_120 has one with
3.9.0, whose ptxas leaves out a value to fit the others into 80 registers."""

Type = str | tuple[str, ...]
"""An argument's type, as Triton writes it: "*u8", "i32", "fp32"; a tuple has several."""


def compile_kernel(
    kernel: Any,
    arch: int,
    types: Mapping[str, Type],
    constants: Mapping[str, object],
    *,
    num_warps: int,
    num_stages: int = 2,
    aligned: Sequence[str] = (),
    enable_fp_fusion: bool = True,
) -> Any:
    """The compiled kernel.

    Args:
        arch: compute capability, for instance 90.
        types: of the arguments that aren't constants. Pointers count as multiples of 16, as torch
            tensors' are; without that every load would be of single bytes.
        aligned: integer arguments that are multiples of 16, too.
    """
    signature: dict[str, Type] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for i, name in enumerate(kernel.arg_names):
        kind = "constexpr" if name in constants else types[name]
        signature[name] = kind
        items = (
            [((i,), kind)] if isinstance(kind, str) else [((i, j), t) for j, t in enumerate(kind)]
        )
        for path, item in items:
            if item.startswith("*") or name in aligned:
                attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, dict(constants), attributes)
    options = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": enable_fp_fusion,
    }
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@dataclass(frozen=True)
class Report:
    """What a kernel takes and does.

    Attributes:
        registers: per thread.
        shared_bytes: per block of threads.
        stack_bytes: local memory per thread.
        loop: the opcodes of the main loop: the longest one that loads from global memory or
            multiplies matrices.
        loads, stores: bytes per thread by the width of an access, "128" to "U8", in the main loop,
            or in all of a kernel that has no loop.
        matrix_ops: opcodes of matrix products, by their first two parts ("HGMMA.64x64x16").
        n_local: accesses to local memory in the main loop: spilled registers.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    loop: tuple[str, ...]
    loads: Counter[str]
    stores: Counter[str]
    matrix_ops: Counter[str]
    n_local: int

    @property
    def n_loop(self) -> int:
        return len(self.loop)

    def wide_share(self, *, ignored_bytes: int = 0) -> float:
        """The share of the loaded bytes that come 16 at a time.

        `ignored_bytes` per thread don't count: loads of them can't be wide.
        """
        narrow = sum(n for width, n in self.loads.items() if width != "128")
        wide = self.loads["128"]
        return wide / max(1, wide + max(0, narrow - ignored_bytes))


def opcodes(sass: str) -> tuple[list[str], dict[str, int], list[tuple[int, str]]]:
    """Opcodes, where labels point, and (position, label) of the branches."""
    ops: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if match := re.fullmatch(r"(\.L_x_\d+):", line.strip()):
            labels[match[1]] = len(ops)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*)", line):
            if match[1].startswith("BRA") and (target := re.search(r"\.L_x_\d+", match[2])):
                branches.append((len(ops), target[0]))
            ops.append(match[1])
    return ops, labels, branches


def _width(op: str) -> str:
    """The width of LDG, STG and LDGSTS; `.E` and what precedes it say nothing about it."""
    widths = [part for part in op.split(".")[1:] if part in BYTES]
    return widths[-1] if widths else "32"


def _is_load(op: str) -> bool:
    return op.startswith(("LDG.", "LDGSTS"))


def _is_matrix_op(op: str) -> bool:
    return re.match(r"(U?[HIQ]G?MMA|UTC\w*MMA|OMMA)", op) is not None


def _main_loop(sass: str) -> list[str]:
    """Waits for barriers stand behind the kernel's end and jump back to where they belong, in a
    loop or not: those are no loops."""
    ops, labels, branches = opcodes(sass)
    spans = [(labels[to], at + 1) for at, to in branches if labels[to] < at]
    spans = [(a, b) for a, b in spans if not any(c < a < d < b for c, d in spans)]
    loops = [ops[a:b] for a, b in spans if "EXIT" not in ops[a:b]]
    working = [loop for loop in loops if any(_is_load(op) or _is_matrix_op(op) for op in loop)]
    return max(working, key=len, default=[])


def _run_tool(name: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(compiled: Any) -> dict[str, int]:
    """What a compiled kernel takes: REG (per thread), STACK (bytes of local memory of each), and
    others. That is known at once, without a look at the machine code."""
    said = _run_tool("cuobjdump", compiled.asm["cubin"], "-res-usage")
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", said)}


def report(compiled: Any) -> Report:
    """What the machine code of a compiled kernel does."""
    sass = _run_tool("nvdisasm", compiled.asm["cubin"], "-c", "--no-dataflow")
    takes = resources(compiled)
    loop = _main_loop(sass)
    ops = loop or opcodes(sass)[0]
    loads, stores = Counter[str](), Counter[str]()
    for op in ops:
        if _is_load(op):
            loads[_width(op)] += BYTES[_width(op)]
        elif op.startswith("STG."):
            stores[_width(op)] += BYTES[_width(op)]
    return Report(
        registers=takes["REG"],
        shared_bytes=compiled.metadata.shared,
        stack_bytes=takes["STACK"],
        loop=tuple(loop),
        loads=loads,
        stores=stores,
        matrix_ops=Counter(".".join(op.split(".")[:2]) for op in ops if _is_matrix_op(op)),
        n_local=sum(op.startswith(("LDL", "STL")) for op in loop),
    )
