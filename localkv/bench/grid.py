"""Tests, the settings that they run with, and the ranges that name both. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

from localkv.errors import UsageError

MOST_VALUES = 10_000
"""Values that one option may stand for; more is a mistyped range."""

_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", re.ASCII)
_RANGE_HINT = "as in 512, 1,2,4, 1-8, 0-4096+1024 or 512-4096*2"


def int_range(text: str, least: int = 0) -> list[int]:
    """The numbers that "N", "FIRST-LAST", "FIRST-LAST+STEP", "FIRST-LAST*FACTOR" and lists name.

    The last number is part of its range where a step meets it.

    Raises:
        UsageError: it is no such list, or a number is less than `least`.
    """
    found: list[int] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        if match is None:
            raise UsageError(f"{item.strip()!r} is neither a number nor a range", hint=_RANGE_HINT)
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        step = 1 if match[4] is None else int(match[4])
        if last < first:
            raise UsageError(f"{item.strip()!r} is an empty range", hint=_RANGE_HINT)
        value = first
        while True:
            if len(found) == MOST_VALUES:
                raise UsageError(f"{text!r} names more than {MOST_VALUES} numbers")
            found.append(value)
            if value == last:
                break
            following = value * step if match[3] == "*" else value + step
            if following <= value:
                raise UsageError(f"{item.strip()!r} is a range without end", hint=_RANGE_HINT)
            if following > last:
                break
            value = following
    small = [value for value in found if value < least]
    if small:
        raise UsageError(f"{small[0]} is less than {least}")
    return found


def prompt_and_generation(text: str) -> tuple[int, int]:
    """Two numbers, "PROMPT,GENERATED", as `-pg` takes them.

    Raises:
        UsageError: it is anything else.
    """
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text, re.ASCII)
    if match is None:
        raise UsageError(f"{text!r} is not a prompt and a generation", hint="as in -pg 512,128")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class BenchTest:
    """One test: evaluate a prompt, generate, or both, at a context depth of `n_depth` tokens."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        """The test's name in llama-bench: "pp512", "tg128 @ d4096", "pp512+tg128"."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """Tokens that are evaluated while the clock runs."""
        return self.n_prompt + self.n_gen

    @property
    def n_before_gen(self) -> int:
        """The context depth at which generation starts; at least one token."""
        return max(1, self.n_depth + self.n_prompt)

    @property
    def n_ctx(self) -> int:
        """Tokens of context that the test needs; the last one drawn needs a place too."""
        if not self.n_gen:
            return self.n_depth + self.n_prompt
        return self.n_before_gen + self.n_gen + 1


@dataclass(frozen=True)
class Setting:
    """The settings of a test; `n_threads` None is the default, the other's is `n_threads`."""

    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    n_threads: int | None = None
    n_threads_batch: int | None = None

    @property
    def n_evaluated(self) -> int:
        """Most tokens evaluated at a time."""
        return min(self.n_batch, self.n_ubatch)


@dataclass(frozen=True)
class Grid:
    """Every setting with every test. Order is llama-bench's: the first setting varies last."""

    n_batch: tuple[int, ...] = (2048,)
    n_ubatch: tuple[int, ...] = (512,)
    pairs: tuple[tuple[str, str], ...] = (("f16", "f16"),)
    n_threads: tuple[int | None, ...] = (None,)
    n_threads_batch: tuple[int | None, ...] = (None,)
    n_depth: tuple[int, ...] = (0,)
    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    n_pg: tuple[tuple[int, int], ...] = ()

    def settings(self) -> list[Setting]:
        return [
            Setting(n_batch, n_ubatch, type_k, type_v, n_threads, n_threads_batch)
            for n_batch, n_ubatch, (type_k, type_v), n_threads, n_threads_batch in product(
                self.n_batch, self.n_ubatch, self.pairs, self.n_threads, self.n_threads_batch
            )
        ]

    def tests(self, n_depth: int) -> list[BenchTest]:
        """The tests at a depth: prompts, generations, then both; none of zero tokens."""
        work = [(n, 0) for n in self.n_prompt] + [(0, n) for n in self.n_gen] + list(self.n_pg)
        return [BenchTest(n_prompt, n_gen, n_depth) for n_prompt, n_gen in work if n_prompt + n_gen]

    @property
    def n_tests(self) -> int:
        """Tests of one model, with all settings."""
        return len(self.settings()) * sum(len(self.tests(depth)) for depth in self.n_depth)
