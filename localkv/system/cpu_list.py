"""Sets of processors as the system and users write them: "0-3,8", "ff", "4-7"."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from localkv.errors import UsageError

_MASK = re.compile(r"(?:0[xX])?[0-9a-fA-F]{1,256}", re.ASCII)
_RANGE = re.compile(r"(\d{0,5})-(\d{0,5})", re.ASCII)


def cpus_of_list(text: str) -> frozenset[int]:
    """Of a list of Linux: "0-3,8\\n"; raises ValueError for another text."""
    found = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def list_of_cpus(cpus: Iterable[int]) -> str:
    """As Linux writes it: "0-3,8"."""
    numbers = sorted(cpus)
    starts = [b for a, b in pairwise([-2, *numbers]) if b != a + 1]
    ends = [a for a, b in pairwise([*numbers, -2]) if b != a + 1]
    pairs = zip(starts, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs)


def cpus_of_mask(text: str) -> frozenset[int]:
    """Of a hexadecimal mask whose lowest bit is CPU 0, as `taskset` and llama.cpp have it.

    Raises:
        UsageError: it is none.
    """
    if not _MASK.fullmatch(text):
        raise UsageError(f"{text!r} is no hexadecimal mask of CPUs", hint="f is the first four")
    mask = int(text, 16)
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)


def cpus_of_range(text: str, most: int) -> frozenset[int]:
    """Of "LOW-HIGH"; without one of them from CPU 0, or to CPU `most`.

    Raises:
        UsageError: it is none.
    """
    match = _RANGE.fullmatch(text)
    if match is None or text == "-":
        raise UsageError(f"{text!r} is no range of CPUs", hint="0-3 is the first four")
    first, last = int(match[1] or 0), int(match[2] or most)
    if last < first:
        raise UsageError(f"{text!r} is an empty range of CPUs")
    return frozenset(range(first, last + 1))
