"""How the KV cache is divided, and how many rows and bytes that takes. No torch.

A *group* is the layers whose rows are alike, and see as far back (`CacheGroup`). A *page* holds
`PAGE_TOKENS` rows of every layer of a group. A *segment* is a range of token positions that is
stored in one pair of types. `KVCache` allocates by this, and the memory plan counts by it.

The first tokens of a text, the *sink*, are stored in f16 only: all later tokens attend to them, and
their K is unlike any other (Xiao et al. 2023; KVQuant, arXiv:2401.18079, section 3.5). The newest
tokens, the *tail*, are read from f16 rows as well (KIVI, arXiv:2402.02750, section 3.2), which are
a second segment of these positions. Types whose scales belong to a channel can't do without it, as
they pack a number of tokens together. Where a token's tail begins depends on the token's position
and on nothing else. So a prompt gives the same in any chunks, and generated text gives the same as
if it had been read in a prompt.

A sequence keeps at most `GroupLayout.most_pages` pages of a group with a window, however long the
context: the others are given back once no later token sees them (`cache/pages.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, NamedTuple

from localkv.arch.spec import CacheGroup, ModelSpec, first_visible
from localkv.cache.ladder import NOT_PINNED, LadderSizes, Pinned, row_bytes
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.quant_formats import FORMATS, KV_FORMATS

TAIL_TYPE = "f16"
"""The type of rows of the tail and of the sink."""
DEFAULT_TAIL = 64
"""Tokens of the tail of types that pack several tokens together."""
DEFAULT_SINK = 4
"""Tokens of the sink that types have by themselves (`default_sink`)."""
FEW_BITS = 4
FEW_BITS_OF_GROUPS = 5


def default_sink(bits: float, group_tokens: int) -> int:
    """Tokens of the sink that a pair of types has by itself.

    Types of fewer than 4 bits have one, and types of at most 5 bits with scales by channel. These
    types diverge by up to a third less with one, and their tail has pages for it. It would take a
    thirtieth off the divergence of q4_0.

    Args:
        bits: per value, of the smaller type.
        group_tokens: that are packed together.
    """
    few = bits <= FEW_BITS_OF_GROUPS if group_tokens > 1 else bits < FEW_BITS
    return DEFAULT_SINK if few else 0


@dataclass(frozen=True)
class Tail:
    """Where the tail begins.

    Attributes:
        start: the first position that is packed: the number of tokens of the sink.
        newest: tokens of the tail at least, a token itself included, as far as there are some.
        group: tokens that are packed together. The tail begins at a multiple of `group`, counted
            from `start`, and includes the tokens of an open group.
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
        """Rows before the row of `start`, in the pages that the tail shares with the sink. They
        are a multiple of a group, so that each group lies in one page."""
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
    """The rows of a group of layers that are stored in f16, in addition to the packed ones.

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
        sink = default_sink(min(bits), tokens)
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


PAGE_TOKENS = 256
"""Tokens of a page; attention tiles divide it."""

DECODED_AT_ONCE = 2
"""Rows that decoding stores before the reader of its tokens has counted the first of them."""

V_ROTATION = 64
"""Channels of V that are rotated together (llama.cpp's choice: smaller seemed better for V)."""


LEAST_SHARE_OF_CONTEXT = 4
"""A window is kept twice, for a checkpoint, if the context is at least this many times as long."""


def pages_for(n_tokens: int) -> int:
    """Pages that hold `n_tokens` rows."""
    return -(-n_tokens // PAGE_TOKENS)


def pages_across(n_tokens: int) -> int:
    """Pages that `n_tokens` consecutive rows lie in at most, wherever they begin."""
    return (n_tokens + PAGE_TOKENS - 2) // PAGE_TOKENS + 1


@dataclass(frozen=True)
class SegmentSpec:
    """Token positions from `first_position` (to the next segment's) are stored in these types.

    Attributes:
        first_position: of row 0.
        rotation_k, rotation_v: channels that are rotated together, or 0 for none.
        tail: a token reads these rows only up to its tail; of the tail itself, from there on.
        is_tail: these rows are the newest ones of the segment before, once more.
    """

    type_k: str
    type_v: str
    first_position: int = 0
    rotation_k: int = 0
    rotation_v: int = 0
    tail: Tail | None = None
    is_tail: bool = False

    @property
    def stores_at_once(self) -> bool:
        """Whether a row is packed when it comes, and not with those that follow."""
        return self.is_tail or self.tail is None or self.tail.group == 1


@dataclass(frozen=True)
class PoolLayout:
    """The pages of a segment, or of the tail and the sink together.

    Attributes:
        segment: the index of the segment whose types they have.
        first, end: positions whose rows they hold.
        most: pages that one sequence has at most.
        kept: pages at the beginning that hold the sink; they are never given back.
    """

    segment: int
    first: int
    end: int
    most: int
    kept: int = 0

    def n_pages(self, n_sequences: int, n_tokens: int | None) -> int:
        """Pages for `n_sequences` sequences that have at most `n_tokens` together.

        None gives each sequence as many as it can have. So does a pool where a sequence never needs
        pages for all its tokens.
        """
        n = self.most * n_sequences
        if n_tokens is None or self.most < pages_for(self.end - self.first):
            return n
        return max(1, min(n, pages_for(n_tokens)))


@dataclass(frozen=True)
class GroupLayout:
    """How the rows of a group of layers are stored, and which of them are kept.

    Attributes:
        keeps_all: rows stay when they have left the window, too.
        budget: bytes, if segments are the rungs of a ladder (`cache/ladder.py`); else None.
        pinned: tokens whose pages do not go down it.
    """

    group: CacheGroup
    segments: tuple[SegmentSpec, ...]
    keeps_all: bool = False
    budget: int | None = None
    pinned: Pinned = NOT_PINNED

    def ladder(self, n_ctx: int, n_sequences: int = 1) -> LadderSizes:
        """How a ladder's arena is divided for `n_sequences` sequences of at most `n_ctx` tokens."""
        assert self.budget is not None
        pairs = [(spec.type_k, spec.type_v) for spec in self.segments]
        n_pages = n_sequences * pages_for(n_ctx)
        return LadderSizes.of(self.group, pairs, self.budget, PAGE_TOKENS, n_pages, self.pinned)

    @property
    def reach(self) -> int:
        """Rows that a token may need, its own included; 0 for all."""
        return 0 if self.keeps_all else self.group.reach

    @cached_property
    def packed(self) -> SegmentSpec:
        """The last segment that is no tail."""
        return self.segments[-2 if self.segments[-1].is_tail else -1]

    @property
    def paging(self) -> tuple[object, ...]:
        """Equal for layouts whose sequences take and give back the same pages at the same time, so
        that one page table serves them all."""
        rows = tuple((spec.first_position, spec.tail, spec.is_tail) for spec in self.segments)
        return self.group.window, self.group.chunk, self.keeps_all, self.budget, rows

    @property
    def row_bytes(self) -> int:
        """Bytes that one token takes once it is packed: K and V of all layers and heads."""
        return self.segment_row_bytes(self.packed)

    def segment_row_bytes(self, spec: SegmentSpec) -> int:
        """Bytes of a token in one of the segments, planes of outliers and all scales included."""
        group = self.group
        k = FORMATS[spec.type_k].row_bytes(group.key_dim)
        v = FORMATS[spec.type_v].row_bytes(group.value_dim)
        return len(group.layers) * group.n_kv_heads * (k + v)

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees, and later ones too."""
        first: int = first_visible(position, self.group.window, self.group.chunk)
        return max(0, first)

    def first_needed(self, position: int) -> int:
        """The first position whose rows are kept for the token at `position` and later ones."""
        return 0 if self.keeps_all else self.first_visible(position)

    def n_rows(self, n_ctx: int, n_batch: int | None = None) -> int:
        """Tokens of a context whose rows one sequence has room for (`most_pages`)."""
        return min(n_ctx, self.most_pages(n_ctx, n_batch) * PAGE_TOKENS)

    def most_pages(self, n_ctx: int, n_batch: int | None = None) -> int:
        """Pages that one sequence holds at most, of all its segments together.

        Args:
            n_batch: most tokens of a batch; None for no limit.

        A prompt's batch needs its own rows and the window before its first token. While tokens are
        generated, the room of a batch is free for what the end of the prompt saw, and a page more.
        With it a conversation can be cut back to there (`KVCache.cut_back`), however long the
        answer has grown. A window that is most of the context gets no room of its own for that, as
        it would cost more.
        """
        if not self.reach or n_batch is None:
            return pages_for(n_ctx)
        before = self.reach - 1
        most = pages_across(before + min(n_ctx, max(n_batch, DECODED_AT_ONCE)))
        if LEAST_SHARE_OF_CONTEXT * self.reach <= n_ctx:
            decoding = pages_across(before + DECODED_AT_ONCE)
            most = max(most, decoding + pages_across(before + PAGE_TOKENS))
        return min(pages_for(n_ctx), most)

    def bounds(self, n_ctx: int) -> list[tuple[int, int]]:
        """(first, end) position of the rows of each segment within a context of `n_ctx` tokens."""
        if self.budget is not None:
            return [(0, n_ctx)] * len(self.segments)
        plain = [spec for spec in self.segments if not spec.is_tail]
        bounds = segment_bounds(plain, n_ctx)
        if len(plain) < len(self.segments):
            bounds.append((self.segments[-1].first_position, max(bounds[-1])))
        return bounds

    def pools(self, n_ctx: int, n_batch: int | None = None) -> tuple[PoolLayout, ...]:
        """The pages of the segments. If there is a tail, the sink's pages come with the tail's."""
        pools, bounds, most = (
            list[PoolLayout](),
            self.bounds(n_ctx),
            self.most_pages(n_ctx, n_batch),
        )
        for i, (spec, (first, end)) in enumerate(zip(self.segments, bounds, strict=True)):
            if self.pool_of(i) != len(pools):
                continue
            kept, pages = 0, most
            if spec.is_tail:
                assert spec.tail is not None
                kept = pages_for(min(spec.tail.start, n_ctx))
                pages = kept + _tail_pages(spec.tail, end - first if n_batch is None else n_batch)
            pools.append(PoolLayout(i, first, end, min(pages, pages_for(end - first)), kept))
        return tuple(pools)

    def pool_of(self, segment: int) -> int:
        """The pool that has a segment's pages, by its index."""
        if self.budget is not None:
            return 0
        if not self.segments[-1].is_tail or len(self.segments) == 2:
            return segment
        return (1, 0, 1)[segment]


def _tail_pages(tail: Tail, n_batch: int) -> int:
    """Pages that hold the rows of a batch and the tail before it. While tokens are generated, they
    hold the tail of these tokens and the tail at the end of the prompt."""
    before = tail.reach - 1
    decoding = pages_across(before + DECODED_AT_ONCE) + pages_across(before + 1)
    return max(pages_across(before + max(n_batch, DECODED_AT_ONCE)), decoding)


def uniform_layouts(
    *, n_layers: int, n_kv_heads: int, head_dim: int, segments: Iterable[SegmentSpec]
) -> tuple[GroupLayout, ...]:
    """The layout of layers that are all alike, without a model."""
    group = CacheGroup(n_kv_heads, head_dim, head_dim, 0, tuple(range(n_layers)))
    return (GroupLayout(group, tuple(segments)),)


def group_layouts(cache: CacheConfig, groups: Iterable[CacheGroup]) -> tuple[GroupLayout, ...]:
    """A model's groups, each stored as the user wants the cache.

    Raises:
        UsageError: `kv_rotation` is "on" and rows of a group can't be rotated.
    """

    def layout(group: CacheGroup) -> GroupLayout:
        segments = cache_segments(cache, group)
        if cache.kv_budget is None or group.reach:
            return GroupLayout(group, segments, cache.swa_full)
        pinned = Pinned(cache.kv_sink or 0, cache.kv_tail or 0)
        return GroupLayout(group, segments, False, cache.ladder_bytes, pinned)

    return tuple(layout(group) for group in typed_groups(cache, groups))


def ladder_layout(layouts: Iterable[GroupLayout]) -> GroupLayout:
    """The layout of the layers whose pages change types. A cache with a budget has one."""
    return next(layout for layout in layouts if layout.budget is not None)


def typed_groups(cache: CacheConfig, groups: Iterable[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups of layers that are stored alike. They are the model's groups. If the cache has
    types by layer, each group is divided into the layers with the same pair."""
    if not cache.layer_types:
        return tuple(groups)
    found = list[CacheGroup]()
    for group in groups:
        by_pair = dict[object, list[int]]()
        for layer in group.layers:
            by_pair.setdefault(cache.layer_types[layer], []).append(layer)
        found += (replace(group, layers=tuple(layers)) for layers in by_pair.values())
    return tuple(found)


def cache_segments(cache: CacheConfig, group: CacheGroup) -> tuple[SegmentSpec, ...]:
    """The segments of a cache as the user wants it, for layers of a group.

    With `kv_rotation` "auto", K and V are each rotated if their type has a scale per block and
    their heads have a multiple of 64 channels, as in llama.cpp: K by the largest power of two that
    divides them, V by 64.

    Raises:
        UsageError: `kv_rotation` is "on" and the heads have no multiple of 64 channels.
    """
    for dim in (group.key_dim, group.value_dim):
        if cache.kv_rotation == "on" and dim % V_ROTATION:
            raise UsageError(
                f"kv_rotation 'on' needs a head_dim that is a multiple of {V_ROTATION}, "
                f"but this model's is {dim}",
                hint="use 'auto' or 'off'",
            )

    def rotated(type_name: str, dim: int) -> bool:
        if cache.kv_rotation == "auto":
            return dim % V_ROTATION == 0 and FORMATS[type_name].shares_scale
        return cache.kv_rotation == "on"

    k, v = group.key_dim, group.value_dim

    def spec(type_k: str, type_v: str) -> SegmentSpec:
        return SegmentSpec(
            type_k,
            type_v,
            rotation_k=k & -k if rotated(type_k, k) else 0,
            rotation_v=V_ROTATION if rotated(type_v, v) else 0,
        )

    if cache.kv_budget is not None and not group.reach:
        return tuple(spec(*pair) for pair in cache.kv_ladder)
    types = types_in(cache, group)
    exact = exact_rows(cache, group, types)
    packed = replace(spec(*types), first_position=exact.sink, tail=exact.tail)
    sink = (SegmentSpec(TAIL_TYPE, TAIL_TYPE),) if exact.sink else ()
    return (*sink, packed, *(tail_segments(exact.tail) if exact.tail else ()))


def tail_segments(tail: Tail) -> tuple[SegmentSpec]:
    """The segment of a tail."""
    first = tail.start - tail.skipped
    return (SegmentSpec(TAIL_TYPE, TAIL_TYPE, first, tail=tail, is_tail=True),)


def types_in(cache: CacheConfig, group: CacheGroup) -> tuple[str, str]:
    """The types of K and of V in one of `typed_groups`; of latents and of rotated parts of keys."""
    if cache.layer_types:
        pair = cache.layer_types[group.layers[0]]
        assert pair is not None  # `check_cache`
        return pair
    if group.is_latent:
        return cache.type_k, cache.type_k_rope
    return cache.types_of(windowed=group.reach > 0)


def pairs_of(cache: CacheConfig, groups: Iterable[CacheGroup]) -> list[tuple[str, str]]:
    """The types of K and of V that groups of layers have, each pair once."""
    return list(dict.fromkeys(types_in(cache, group) for group in typed_groups(cache, groups)))


def segment_bounds(specs: Sequence[SegmentSpec], n_ctx: int) -> list[tuple[int, int]]:
    """(first, end) position of each segment within a context of `n_ctx` tokens."""
    firsts = [spec.first_position for spec in specs]
    if not specs or firsts[0] != 0 or sorted(set(firsts)) != firsts:
        raise ValueError("segments must start at position 0 and be in order of position")
    ends = [*firsts[1:], n_ctx]
    return [(first, max(first, end)) for first, end in zip(firsts, ends, strict=True)]


def group_bytes(
    layout: GroupLayout,
    *,
    n_ctx: int,
    n_batch: int | None = None,
    n_sequences: int = 1,
    n_tokens: int | None = None,
) -> tuple[int, int]:
    """Bytes that `KVCache` allocates for K and for V of one group."""
    group = layout.group
    if layout.budget is not None:
        return _arena_bytes(layout, n_ctx, n_sequences)
    k = v = 0
    heads = len(group.layers) * group.n_kv_heads
    for pool in layout.pools(n_ctx, n_batch):
        spec = layout.segments[pool.segment]
        rows = pool.n_pages(n_sequences, n_tokens) * PAGE_TOKENS * heads
        k += rows * FORMATS[spec.type_k].row_bytes(group.key_dim)
        v += rows * FORMATS[spec.type_v].row_bytes(group.value_dim)
    return k, v


def _arena_bytes(layout: GroupLayout, n_ctx: int, n_sequences: int) -> tuple[int, int]:
    """Bytes of a ladder's arenas: K and V share them, as they do a page on the first rung."""
    sizes, group, first = layout.ladder(n_ctx, n_sequences), layout.group, layout.segments[0]
    total = len(group.layers) * sizes.n_units * sizes.unit
    of_k = FORMATS[first.type_k].row_bytes(group.key_dim)
    k = total * of_k // row_bytes(group, (first.type_k, first.type_v))
    return k, total - k


def cache_bytes(
    layouts: Iterable[GroupLayout],
    *,
    n_ctx: int,
    n_batch: int | None = None,
    n_sequences: int = 1,
    n_tokens: int | None = None,
) -> tuple[int, int]:
    """Bytes that `KVCache` allocates for K and for V."""
    both = [
        group_bytes(
            layout, n_ctx=n_ctx, n_batch=n_batch, n_sequences=n_sequences, n_tokens=n_tokens
        )
        for layout in layouts
    ]
    return sum(k for k, _ in both), sum(v for _, v in both)


Counts = Sequence[int]
"""Rows of each segment of a group of layers."""


def bytes_of(layout: GroupLayout, counts: Counts) -> int:
    """Bytes of the rows that `counts` lists: K and V of all layers and heads of the group."""
    rows = zip(layout.segments, counts, strict=True)
    return sum(n * layout.segment_row_bytes(spec) for spec, n in rows)


def exact_bytes(layout: GroupLayout, counts: Counts) -> int:
    """Bytes of the rows that `counts` lists for a tail and a sink."""
    packed = layout.segments.index(layout.packed)
    return bytes_of(layout, [0 if i == packed else n for i, n in enumerate(counts)])


def kept_rows(layout: GroupLayout, n_tokens: int, n_batch: int | None = None) -> list[int]:
    """Rows that a sequence of `n_tokens` has, without the rest of its pages.

    Args:
        n_batch: most tokens of a batch, for layers with a window (`GroupLayout.most_pages`).
    """
    counts, bounds = list[int](), layout.bounds(n_tokens)
    oldest = n_tokens - layout.n_rows(n_tokens, n_batch)
    for spec, (first, end) in zip(layout.segments, bounds, strict=True):
        tail = spec.tail
        if tail is None:
            begin = first if spec is not layout.packed else max(first, oldest)
        elif spec.is_tail:
            begin = max(tail.start, tail.first_needed(n_tokens - 1))
        else:
            begin, end = max(tail.start, oldest), min(end, max(tail.start, tail.whole(n_tokens)))
        counts.append(max(0, min(end, n_tokens) - begin))
    return counts


def read_rows(layout: GroupLayout, n_before: int, n_new: int) -> list[int]:
    """Rows that new tokens after `n_before` others see, their own included, each counted once."""
    counts, stop = list[int](), n_before + n_new
    spans, tail = [(n_before, stop - 1)], layout.packed.tail
    if tail is not None and (layout.reach or not tail.newest):
        # a row that leaves a window before it leaves the tail is never read packed, and a tail that
        # has no more than an open group is not read for the last row of a group
        spans = [(position, position) for position in range(n_before, stop)]
    for spec, (first, bound) in zip(layout.segments, layout.bounds(stop), strict=True):
        n_rows = done = 0
        for position, last in spans:
            begin, end = max(first, layout.first_visible(position)), min(bound, last + 1)
            if spec.tail is not None and spec.is_tail:
                begin = max(begin, int(spec.tail.begin(position)))
            elif spec.tail is not None:
                end = min(end, int(spec.tail.begin(last)))
            n_rows += max(0, end - max(begin, done))
            done = max(done, end)
        counts.append(n_rows)
    return counts


def written_rows(layout: GroupLayout, n_before: int, n_new: int) -> list[int]:
    """Rows that are stored with new tokens after `n_before` others. Types that pack several rows
    together store whole groups only."""
    end, counts = n_before + n_new, list[int]()
    for spec, (first, bound) in zip(layout.segments, layout.bounds(end), strict=True):
        tail, begin, last = spec.tail, n_before, end
        if tail is not None:
            first = tail.start
            if not spec.stores_at_once:
                begin, last = max(first, tail.whole(n_before)), tail.whole(end)
        counts.append(max(0, min(bound, last) - max(first, begin)))
    return counts


def allocated_bits(cache: CacheConfig, groups: Iterable[CacheGroup], n_batch: int) -> float:
    """Bits per value of K and V in a sequence's context.

    This is the sum of two parts. One is the bits of packed rows with their scales, for which all
    layers count alike. The other is what pages in f16 add for a tail and a sink. It is relative to
    the pages of an f16 cache, where layers with a window keep fewer pages.

    Args:
        n_batch: most tokens of a batch, which a tail has room for.
    """
    n_values = packed = exact = as_f16 = 0
    for layout in group_layouts(cache, groups):
        group = layout.group
        row_values = len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
        n_values += row_values
        packed += layout.row_bytes
        as_f16 += row_values * layout.most_pages(cache.n_ctx, n_batch)
        for pool in layout.pools(cache.n_ctx, n_batch):
            if layout.segments[pool.segment] is not layout.packed:
                exact += row_values * pool.n_pages(1, None)
    return 8 * packed / n_values + 16 * exact / as_f16


def in_words(layer_types: Sequence[tuple[str, str] | None]) -> str:
    """Runs of layers with one pair, "0-3 q8_0/q4_0, 4 q5_1/q5_1"; skips layers without a pair."""
    runs = list[str]()
    for pair, items in groupby(enumerate(layer_types), key=lambda item: item[1]):
        layers = [layer for layer, _ in items]
        if pair is not None:
            span = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
            runs.append(f"{span} {'/'.join(pair)}")
    return ", ".join(runs)


def with_one_pair(cache: CacheConfig, type_k: str, type_v: str) -> CacheConfig:
    """The cache with one pair for all layers. Where it had types by layer, their tail and sink go
    with them."""
    if cache.layer_types:
        cache = replace(cache, layer_types=(), kv_tail=None, kv_sink=None)
    return replace(cache, type_k=type_k, type_v=type_v)


def with_types(cache: CacheConfig, layer_types: tuple[tuple[str, str] | None, ...]) -> CacheConfig:
    """A cache with types by layer. Its tail and its sink are left out where no layer is packed,
    which has no use for them."""
    names = {name for pair in layer_types if pair is not None for name in pair}
    formats = [KV_FORMATS[name] for name in names]
    if all(8 * fmt.block_bytes >= 16 * fmt.block_size for fmt in formats):
        cache = replace(cache, kv_tail=None, kv_sink=None)
    return replace(cache, layer_types=layer_types)


class CodebookUse(NamedTuple):
    """The codebook of one layer's K or V.

    Attributes:
        type: the cache type that selects from it.
        is_measured: it comes from a profile; else it is the codebook of normal numbers.
    """

    layer: int
    side: Literal["k", "v"]
    type: str
    is_measured: bool


def codebooks_in_words(uses: Iterable[CodebookUse]) -> str:
    """Say where codebooks come from, "K nuq3, V nuq4: of the profile". Layers are named where other
    layers have a codebook of the other kind for the same side and type."""
    found = dict[bool, dict[str, list[int]]]({True: {}, False: {}})
    for use in sorted(set(uses), key=lambda use: (use.side, use.type, use.layer)):
        found[use.is_measured].setdefault(f"{use.side.upper()} {use.type}", []).append(use.layer)
    parts = []
    for measured, origin in ((True, "the profile"), (False, "normal numbers, without a profile's")):
        rows = [
            f"{name} (layers {_runs(layers)})" if name in found[not measured] else name
            for name, layers in found[measured].items()
        ]
        if rows:
            parts.append(f"{', '.join(rows)}: of {origin}")
    return "; ".join(parts)


def _runs(numbers: list[int]) -> str:
    """Ascending numbers as "0-3, 5"."""
    runs = list[str]()
    for _, items in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in items]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(runs)


def fits_head(type_name: str, config: ModelSpec) -> bool:
    """Whether rows of all heads, of K and of V, are a whole number of the type's blocks."""
    size = KV_FORMATS[type_name].block_size
    return all(
        dim % size == 0
        for group in config.groups
        for dim in (group.key_dim, *(() if group.is_latent else (group.value_dim,)))
    )


def kv_side_bytes_per_token(
    side: Literal["k", "v"],
    type_name: str,
    config: ModelSpec,
    *,
    type_k_rope: str = CacheConfig.type_k_rope,
) -> int:
    """Bytes that one token takes on one side of the cache, K or V, in all layers and heads.

    If some layers see all of the context, only these count: the others' rows don't grow with it.

    Args:
        type_k_rope: type of the rotated parts of keys, which are V's side beside latents.
    """
    total = 0
    for group in growing_groups(config):
        name = type_k_rope if group.is_latent and side == "v" else type_name
        row = KV_FORMATS[name].row_bytes(group.key_dim if side == "k" else group.value_dim)
        total += len(group.layers) * group.n_kv_heads * row
    return total


def growing_groups(config: ModelSpec) -> tuple[CacheGroup, ...]:
    """The groups without a window, or all if each has one."""
    return tuple(group for group in config.groups if not group.reach) or config.groups


def context_bytes(cache: CacheConfig, config: ModelSpec, n_batch: int | None = None) -> int:
    """Bytes of the rows that a full context of one sequence has, without the rest of its pages."""
    return sum(bytes_of(*counts) for counts in _kept_rows(cache, config, n_batch))


def exact_context_bytes(cache: CacheConfig, config: ModelSpec, n_batch: int | None = None) -> int:
    """Bytes of the rows that a full context of one sequence keeps in its tails and sinks."""
    return sum(exact_bytes(*counts) for counts in _kept_rows(cache, config, n_batch))


def _kept_rows(
    cache: CacheConfig, config: ModelSpec, n_batch: int | None
) -> Iterator[tuple[GroupLayout, list[int]]]:
    for layout in group_layouts(cache, config.groups):
        yield layout, kept_rows(layout, cache.n_ctx, n_batch)


def kv_values_per_token(config: ModelSpec) -> int:
    """Values of K and V that one token has in all layers and heads."""
    return sum(
        len(group.layers) * group.n_kv_heads * (group.key_dim + group.value_dim)
        for group in config.groups
    )


def mean_bits(pair: tuple[str, str], config: ModelSpec) -> float:
    """Bits per value of K and V in all layers, scales included."""
    return mean_bits_of(CacheConfig(*pair), config)


def mean_bits_of(cache: CacheConfig, config: ModelSpec) -> float:
    """Bits per value of K and V in a cache, whose layers may have types of their own."""
    row = sum(one.row_bytes for one in group_layouts(cache, config.groups))
    return 8 * row / kv_values_per_token(config)


def kv_bytes_per_token(
    type_k: str, type_v: str, config: ModelSpec, *, type_k_rope: str = CacheConfig.type_k_rope
) -> int:
    """Bytes that one token takes in the KV cache; see `kv_side_bytes_per_token`."""
    k = kv_side_bytes_per_token("k", type_k, config)
    return k + kv_side_bytes_per_token("v", type_v, config, type_k_rope=type_k_rope)
