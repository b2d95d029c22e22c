"""The tail and the sink: which rows a token reads as they are, in f16, and not packed. No torch.

The first tokens of a text, the *sink*, are stored in f16 only: all later tokens attend to them, and
their K is unlike any other (Xiao et al. 2023; KVQuant, arXiv:2401.18079, section 3.5). The newest
ones are read from f16 rows as well (KIVI, arXiv:2402.02750, section 3.2), the *tail*. Types whose
scales are those of a channel can't do without it, as they pack a number of tokens together.

Where a token's tail begins depends on the token's position and on nothing else, so that a prompt
gives the same in any chunks, and generated text the same as if it had been read in a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from localkv.arch.spec import CacheGroup
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.formats import FORMATS

TAIL_TYPE = "f16"
"""The type of rows of the tail and of the sink."""
DEFAULT_TAIL = 64
"""Tokens of the tail of types that pack several tokens together."""
DEFAULT_SINK = 4
"""Tokens of the sink of types with fewer bits than `FEW_BITS`."""
FEW_BITS = 4


@dataclass(frozen=True)
class Tail:
    """Where the tail begins.

    Attributes:
        start: the first position that is packed: the number of tokens of the sink.
        newest: tokens of the tail at least, a token itself included, as far as there are some.
        group: tokens that are packed together: the tail begins at a multiple of them, counted from
            `start`, and those of an open group are in it.
    """

    start: int
    newest: int
    group: int = 1

    @property
    def reach(self) -> int:
        """Rows of the tail that a token, or those packed with it, needs; its own included."""
        return max(1, self.newest) + self.group - 1

    @property
    def skipped(self) -> int:
        """Rows before that of `start`, in the pages that the tail shares with the sink: so many
        that a group lies in one page."""
        return -(-self.start // self.group) * self.group

    def begin(self, position: Any) -> Any:
        """The first position that the token at `position` reads in the tail, of a number or an
        array of any kind; one more than `position` if it reads none there."""
        packed = (position - self.start + 1 - self.newest) // self.group * self.group
        return self.start + packed * (packed > 0)

    def first_needed(self, position: int) -> int:
        """The first position whose rows in the tail are kept for the token at `position`, which may
        be the last one of a group, and later ones."""
        return min(int(self.begin(position)), self.whole(position))

    def whole(self, position: int) -> int:
        """The last position up to `position` at which a group begins, or which is in the sink."""
        return position - max(0, position - self.start) % self.group


@dataclass(frozen=True)
class ExactRows:
    """What of a group of layers is stored in f16 besides the packed rows.

    Attributes:
        sink: tokens.
        tail: None if tokens read all later rows packed.
    """

    sink: int = 0
    tail: Tail | None = None


def exact_rows(cache: CacheConfig, group: CacheGroup, types: tuple[str, str]) -> ExactRows:
    """What is stored in f16 of layers whose rows have these types.

    Of layers whose types are no smaller than f16 nothing is.
    """
    formats = [FORMATS[name] for name in types]
    dims = group.key_dim, group.value_dim
    bits = [fmt.bits_per_value(dim) for fmt, dim in zip(formats, dims, strict=True)]
    if min(bits) >= 16:
        return ExactRows()
    tokens = max(fmt.group_tokens for fmt in formats)
    newest, sink = cache.kv_tail, cache.kv_sink
    if newest is None:
        newest = DEFAULT_TAIL if tokens > 1 else 0
    if sink is None:
        sink = DEFAULT_SINK if min(bits) < FEW_BITS else 0
    tail = Tail(sink, newest, tokens) if newest or tokens > 1 else None
    return ExactRows(sink, tail)


def check_tail(cache: CacheConfig, pairs: Iterable[tuple[CacheGroup, tuple[str, str]]]) -> None:
    """Refuse a tail or a sink that no layer would have.

    Args:
        pairs: the model's groups of layers, and the types of their rows.

    Raises:
        UsageError: names the option.
    """
    pairs = list(pairs)
    for flag, value in (("--kv-tail", cache.kv_tail), ("--kv-sink", cache.kv_sink)):
        if value and all(exact_rows(cache, *pair) == ExactRows() for pair in pairs):
            raise UsageError(
                f"{flag} {value} keeps rows in f16, and {cache.types_text} is no smaller than that",
                hint=f"leave out {flag}, or choose smaller types of the cache",
            )
