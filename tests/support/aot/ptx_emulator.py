"""Runs PTX on a CPU: what the inline assembly of the GPU's kernels consists of. Branches go forward
only; a thread that takes one does nothing up to its label."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def prmt(a: Words, b: Words, selector: Words) -> Words:
    """Each nibble of the selector picks one of eight bytes, or its sign eight times if bit 3 is
    set."""
    table = np.stack([(word >> (8 * i)) & 0xFF for word in (a, b) for i in range(4)])
    picked = np.zeros_like(a)
    for i in range(4):
        nibble = (selector >> (4 * i)) & 0xF
        byte = np.take_along_axis(table, (nibble & 7)[None].astype(np.int64), 0)[0]
        picked |= np.where(nibble & 8, (byte >> 7) * 0xFF, byte).astype(np.uint32) << (8 * i)
    return picked


def lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    """Bit 4 a + 2 b + c of the table, for each bit."""
    out = np.zeros_like(a)
    for i in range(8):
        if (int(table[0]) >> i) & 1:
            terms = [x if (i >> shift) & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def rotated(a: Words, b: Words, n: Words) -> Words:
    """The upper half of `b` and `a` below it, moved to the left by the lower five bits of `n`."""
    n = (n & 31).astype(np.uint64)
    both = b.astype(np.uint64) << np.uint64(32) | a
    return (both << n >> np.uint64(32)).astype(np.uint32)


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
    "shf.l.wrap.b32": rotated,
    "setp.ne.b32": lambda a, b: (a != b).astype(np.uint32),
    "selp.b32": lambda a, b, p: np.where(p, a, b),
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
        if operand.startswith("{"):
            low, high = (registers[name.strip()] for name in operand[1:-1].split(","))
            return low | high << 16
        return registers[operand]

    def set_to(target: str, words: Words) -> None:
        if target.startswith("{"):
            low, high = (name.strip() for name in target[1:-1].split(","))
            registers[low], registers[high] = words & 0xFFFF, words >> 16
        elif target in registers:
            registers[target] = np.where(runs, words, registers[target])
        else:
            registers[target] = words

    runs, label = np.ones(inputs[0].shape, bool), ""
    for statement in ptx.strip()[1:-1].split(";"):
        if label and (found := re.match(rf"\s*{label}:", statement)):
            runs, label, statement = np.ones_like(runs), "", statement[found.end() :]
        words = statement.split(None, 1)
        if words and words[0].startswith("@!"):
            assert not label, "a branch within what another one jumps over"
            runs, label = registers[words[0][2:]] != 0, words[1].split()[1]
        elif words and words[0] != ".reg":
            target, *operands = re.findall(r"\{[^}]*\}|[^,\s]+", words[1])
            set_to(target, OPERATIONS[words[0]](*map(value, operands)))
    return [registers[f"${i}"] for i in range(n_outputs)]
