"""Runs straight-line PTX on a CPU: what the inline assembly of the GPU's kernels consists of."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Each nibble of the selector (bit 3 unset) picks one of eight bytes."""
    table = np.stack([(word >> (8 * i)) & 0xFF for word in (a, b) for i in range(4)])
    picked = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        if (nibble & 8).any():
            raise NotImplementedError("prmt that repeats a sign")
        picked |= np.take_along_axis(table, nibble[None].astype(np.int64), 0)[0] << (8 * i)
    return picked


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit 4 a + 2 b + c of the table, for each bit."""
    out = np.zeros_like(a)
    for i in range(8):
        if (int(table[0]) >> i) & 1:
            terms = [x if (i >> shift) & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _halves(f: Callable[..., NDArray[np.float64]]) -> Callable[..., Words]:
    """In float64, which is exact for one operation on fp16, then rounded once."""

    def run(*words: Words) -> Words:
        values = [np.ascontiguousarray(w).view(np.float16).astype(np.float64) for w in words]
        return f(*values).astype(np.float16).view(np.uint32)

    return run


OPERATIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: np.where(b < 32, a << (b & 31), np.uint32(0)),
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "sub.u32": lambda a, b: a - b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "set.eq.f16x2.f16x2": _halves(lambda a, b: (a == b) * 1.0),
    "add.f16x2": _halves(lambda a, b: a + b),
    "sub.f16x2": _halves(lambda a, b: a - b),
    "mul.f16x2": _halves(lambda a, b: a * b),
    "min.f16x2": _halves(np.fmin),
    "max.f16x2": _halves(np.fmax),
    "min.NaN.f16x2": _halves(np.minimum),
    "max.NaN.f16x2": _halves(np.maximum),
    "fma.rn.f16x2": _halves(lambda a, b, c: a * b + c),
}


def run(ptx: str, inputs: list[Words], n_outputs: int) -> list[Words]:
    """`$0` ... are the outputs, the inputs follow."""
    registers = {f"${n_outputs + i}": words for i, words in enumerate(inputs)}

    def value(operand: str) -> Words:
        if re.fullmatch(r"(0x)?[0-9A-F]+", operand):
            return np.full_like(inputs[0], int(operand, 0))
        return registers[operand]

    for statement in ptx.strip().strip("{}").split(";"):
        words = statement.split(None, 1)
        if words and words[0] != ".reg":
            target, *operands = (operand.strip() for operand in words[1].split(","))
            registers[target] = OPERATIONS[words[0]](*map(value, operands))
    return [registers[f"${i}"] for i in range(n_outputs)]
