"""Caches with a budget: where pages lie, and what they hold once their types have changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.arch.spec import CacheGroup
from localkv.cache.cache_checks import check_cache
from localkv.cache.kv_cache import KVCache, SteadyRows
from localkv.cache.ladder import (
    DEFAULT_LADDER,
    LadderSizes,
    Pinned,
    check_ladder,
    ladder_text,
    parse_ladder,
)
from localkv.cache.ladder_pool import Runs
from localkv.cache.layout import PAGE_TOKENS, group_layouts
from localkv.cache.pages import NoPageError, Sequence
from localkv.cache.repack import hadamard, repack_page
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.attention import store_rotated
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.reference.backend import hadamard_transform, store_kv
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.quant_formats import FORMATS, KV_FORMATS
from support.attack.interruptions import Interruption

GROUP = CacheGroup(2, 64, 64, 0, (0, 1))
F16_PAGE = 2 * 2 * PAGE_TOKENS * (128 + 128)
BY_ROW = parse_ladder("f16,q8_0,q8_0/q4_0,q4_0")
"""Pages can be on each rung while rows are stored in them."""
LADDERS = [
    DEFAULT_LADDER,
    BY_ROW,
    parse_ladder("f16,q8_0,q5_1,q4_0"),
    parse_ladder("q8_0/q6_0,q6_0/q4_t"),
    parse_ladder("bf16,fp8_e4m3,iq4_nl,kv3_0,kv2_1"),
    parse_ladder("f16,q8_0,q4_1c/q4_1,kv3_1c/kv2_1"),
    parse_ladder("f16,q8_0,q4_1c128/kv3_0,kv3_1c128/kv2_0"),
    parse_ladder("q8_0,q5_1/q4_1c,q4_0"),
]


def cache_of(ladder, budget, *, n_ctx=8 * PAGE_TOKENS, arrays=None, n_sequences=3, **exact):
    (type_k, type_v), *_ = ladder
    config = CacheConfig(type_k, type_v, kv_budget=budget, kv_ladder=ladder, **exact)
    layouts = group_layouts(config, [GROUP])
    arrays = arrays or TorchArrays()
    return KVCache(layouts, n_ctx=n_ctx, n_sequences=n_sequences, arrays=arrays)


def test_ladder_is_read_as_it_is_written():
    pairs = parse_ladder("f16, q8_0/q8_0,q8_0/q4_0")
    assert pairs == (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"))
    assert parse_ladder(ladder_text(pairs)) == pairs


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("f16,q9", "unknown cache type 'q9'"),
        ("q4_1c,kv3_0", "can't begin with q4_1c/q4_1c"),
        ("f16/q4_1c,kv3_0", "can't begin with f16/q4_1c"),
        ("f16,nuq4", "can't change to or from nuq4"),
        ("f16,fp8_e4m3_head", "can't change to or from fp8_e4m3_head"),
        ("f16", "2 to 5 pairs"),
        ("f16,q8_0,q6_0,q5_0,q4_0,kv3_0", "2 to 5 pairs"),
        ("q4_0,q8_0", "from q4_0/q4_0 to q8_0/q8_0 makes K and V larger"),
        ("q8_0/q4_0,q4_0/q8_0", "makes V larger"),
        ("f16,f16", "from f16/f16 to f16/f16 changes nothing"),
        ("f16,bf16", "the same memory"),
    ],
)
def test_ladders_that_are_not_legal_are_refused(text, says):
    with pytest.raises(UsageError, match=says) as error:
        parse_ladder(text)
    assert error.value.hint


def test_formats_say_which_steps_are_legal():
    legal = {name for name, fmt in KV_FORMATS.items() if fmt.repacks}
    assert {"f16", "q8_0", "q5_1", "q4_0", "q4_1c"} <= legal
    assert not legal & {"nuq3", "fp8_e5m2_head"}
    check_ladder([("f16", "f16"), ("q8_0", "q8_0"), ("q5_1", "q5_1"), ("q4_0", "q4_0")])


@pytest.mark.parametrize(
    ("settings_", "groups", "says"),
    [
        ({"kv_tail": 64, "kv_ladder": parse_ladder("q8_0,q4_0")}, [GROUP], "begins with q8_0"),
        ({"kv_sink": 4, "kv_ladder": parse_ladder("f16/q8_0,q4_0")}, [GROUP], "with f16/q8_0"),
        ({}, [CacheGroup(2, 64, 64, 128, (0, 1))], "nothing but layers with a window"),
        ({}, [GROUP, CacheGroup(1, 64, 64, 0, (2,))], "differ in size"),
        ({"layer_types": (("f16", "f16"), ("q8_0", "q8_0"))}, [GROUP], "types by layer"),
    ],
)
def test_caches_whose_pages_stay_as_they_are_are_refused(settings_, groups, says):
    cache = CacheConfig(**{"kv_budget": 1 << 20, "kv_ladder": DEFAULT_LADDER, **settings_})
    with pytest.raises(UsageError, match=says):
        check_cache(cache, groups)


@given(st.data())
def test_runs_stay_apart_and_keep_what_is_in_them(data):
    n_units = data.draw(st.integers(1, 40))
    runs, memory, sizes = Runs(n_units), [None] * n_units, {}
    for owner in range(data.draw(st.integers(0, 25))):
        n = data.draw(st.integers(1, 12))
        if n <= runs.n_free and not runs.take(owner, n):
            for move in runs.gather(n):
                assert move.to < move.first
                memory[move.to : move.to + move.n] = memory[move.first : move.first + move.n]
            assert runs.take(owner, n)
        if owner in runs.owners:
            first, sizes[owner] = runs.first(owner), n
            memory[first : first + n] = [(owner, i) for i in range(n)]
        if sizes and data.draw(st.booleans()):
            other = data.draw(st.sampled_from(sorted(sizes)))
            left = data.draw(st.integers(0, sizes[other]))
            if left:
                runs.shrink(other, left)
                sizes[other] = left
            else:
                runs.give_back(other)
                del sizes[other]
        for owner_, n_ in sizes.items():
            first = runs.first(owner_)
            assert memory[first : first + n_] == [(owner_, i) for i in range(n_)]
        assert runs.n_free == n_units - sum(sizes.values())


@pytest.mark.parametrize(
    "call",
    [
        lambda runs: runs.take(4, 3),
        lambda runs: runs.shrink(2, 1),
        lambda runs: runs.give_back(2),
        lambda runs: runs.gather(4),
    ],
    ids=["take", "shrink", "give_back", "gather"],
)
def test_runs_are_in_order_again_after_an_exception_at_any_instruction(call):
    number = 0
    while True:
        runs, number = Runs(12), number + 1
        for owner in range(4):
            runs.take(owner, 2)
        runs.give_back(1)
        if not Interruption(number, "opcode").during(partial(call, runs)):
            break
        runs.keep({0: 2, 2: 1})
        assert runs.owners in ([0, 2], [0])
        assert runs.n_free == 11 - len(runs.owners)
        assert runs.take(5, 7)
    assert number > 10


def test_a_cache_is_empty_again_after_an_exception_at_any_instruction():
    number = 0
    while True:
        cache, number = cache_of(DEFAULT_LADDER, 2 * F16_PAGE, arrays=NumpyArrays()), number + 1
        sequence = cache.new_sequence()
        cache.batch([(sequence, [0] * 300)])
        sequence.length = 300
        if not Interruption(number).during(partial(cache.truncate, sequence, 0)):
            break
        cache.start_over([sequence])
        assert cache.ladder.runs.n_free == cache.ladder.sizes.n_units
        assert sorted(cache.ladder.free) == list(range(cache.ladder.n_pages))
        cache.batch([(sequence, [0] * 512)])
    assert number > 100


PINNED = st.builds(Pinned, st.sampled_from([0, 0, 4, 300]), st.sampled_from([0, 0, 1, 64, 300]))


@given(st.sampled_from(LADDERS), st.integers(1, 60), st.integers(1, 12), PINNED)
def test_a_text_grows_down_the_ladder_within_its_budget(ladder, tenths, n_pages, pinned):
    sizes = LadderSizes.of(GROUP, ladder, tenths * F16_PAGE // 10, PAGE_TOKENS, n_pages, pinned)
    before, room = list[int](), sizes.room(512)
    if pinned == Pinned() and sizes.n_storing == len(ladder):
        assert room == sizes.n_pages
    for rungs in sizes.growth(n_pages):
        if rungs is None:
            assert room <= len(before)
            break
        assert sum(sizes.units[rung] for rung in rungs) <= sizes.n_units
        assert all(was <= now for was, now in zip(before, rungs, strict=False))
        assert not any(rungs[: sizes.n_sink])
        if pinned.tail:
            assert not any(rungs[max(0, len(rungs) - 1 - (pinned.tail - 1) // PAGE_TOKENS) :])
        before = rungs


def test_first_and_newest_pages_go_down_last():
    sizes = LadderSizes.of(GROUP, DEFAULT_LADDER, 4 * F16_PAGE, PAGE_TOKENS, 20)
    grown = list(sizes.growth(6))
    assert grown[3] == [0, 0, 0, 0]
    assert grown[4] == [0, 1, 1, 1, 0]
    assert all(rungs[-1] == 0 for rungs in grown if rungs)


def test_a_new_page_takes_others_down_to_the_rung_below_its_own_at_most():
    sizes = LadderSizes.of(GROUP, BY_ROW, 9 * F16_PAGE // 2, PAGE_TOKENS, 20)
    grown = list(sizes.growth(20))
    assert grown[5] == [0, 1, 1, 1, 1, 0]
    assert grown[7] == [1] * 8
    assert all(max(rungs) - min(rungs) <= 1 for rungs in grown if rungs)


def test_memory_is_what_the_plan_says_and_no_more_than_the_budget():
    for budget in (F16_PAGE, 5 * F16_PAGE // 2, 100 * F16_PAGE):
        cache = cache_of(DEFAULT_LADDER, budget, arrays=NumpyArrays(), n_sequences=1)
        allocated = sum(arena.nbytes for arena in cache._arenas.arenas.values())
        assert allocated == cache.n_bytes("k") + cache.n_bytes("v")
        assert allocated <= min(budget, 8 * F16_PAGE)


@dataclass
class Rows:
    """What a sequence should hold: rows as they came, and the rungs that each has been on."""

    sequence: Sequence
    k: list[np.ndarray] = field(default_factory=list)
    v: list[np.ndarray] = field(default_factory=list)
    rungs: list[tuple[int, ...]] = field(default_factory=list)

    def fork(self, sequence):
        n = sequence.length
        return Rows(sequence, self.k[:n], self.v[:n], self.rungs[:n])

    def cut(self, n):
        del self.k[n:], self.v[n:], self.rungs[n:]

    def follow(self, pool):
        """Note on which rungs pages are now."""
        for row, before in enumerate(self.rungs):
            rung = pool.rungs[self.sequence.pages[0][row // PAGE_TOKENS]]
            if rung < before[-1]:
                self.rungs[row] = (*before, rung)  # raised at once
            else:
                self.rungs[row] = (*before, *range(before[-1] + 1, rung + 1))


def append(cache, texts, rows, n, rng):
    """Evaluate `n` tokens of one of the texts with random rows."""
    most = cache.ladder.sizes.batch(512)
    while n > 0:
        append_batch(cache, rows, min(n, most), rng, texts)
        n -= most


def append_batch(cache, rows, n, rng, texts):
    x = rng.standard_normal((2, n, 2, 64), np.float32) * rng.uniform(0.1, 8)
    batch = cache.batch([(rows.sequence, [0] * n)])
    k, v = (torch.from_numpy(side) for side in x)
    for layer in cache.layers:
        store_rotated(store_kv, hadamard_transform, k, v, layer, layer.rows_of(batch))
    for text in texts:
        text.follow(cache.ladder)
    stored = [i for i, part in enumerate(batch.segments) if len(part.tokens)]
    assert len(stored) == 1, "a batch's rows go to one segment"
    rows.sequence.length += n
    rows.k += list(x[0])
    rows.v += list(x[1])
    rows.rungs += [tuple(stored)] * n


def packed(x, specs, side):
    """Rows as they are stored, after the types of some rungs one after the other: rotated."""
    before, last = 0, None
    for spec in specs:
        types = getattr(spec, f"type_{side}"), getattr(spec, f"rotation_{side}")
        if types == last:
            continue
        last = types
        fmt = FORMATS[getattr(spec, f"type_{side}")]
        rotation = getattr(spec, f"rotation_{side}")
        if rotation != before:
            x = hadamard(hadamard(x, before), rotation)
        x = fmt.codec.decode(fmt.codec.encode(x))
        before = rotation
    return x


def check(cache, rows, rng):
    """Pages hold the rows as the chain of types gives them, to the bit."""
    pool, specs = cache.ladder, cache.layouts[0].segments
    for place, page in enumerate(rows.sequence.pages[0]):
        first, end = place * PAGE_TOKENS, min((place + 1) * PAGE_TOKENS, rows.sequence.length)
        rung = pool.rungs[page]
        for row in {first, end - 1, int(rng.integers(first, end))} if end > first else ():
            for layer in cache.layers:
                segment = layer.segments[rung]
                for side, values in (("k", rows.k), ("v", rows.v)):
                    of_row = [plane[pool.place(page)].numpy() for plane in getattr(segment, side)]
                    found = getattr(segment, f"format_{side}").codec.decode(of_row)
                    chain = [specs[i] for i in rows.rungs[row]]
                    names = [name for spec in chain for name in (spec.type_k, spec.type_v)]
                    n = max(FORMATS[name].group_tokens for name in names)
                    begin = row - row % n
                    group = values[begin : begin + n]
                    if n > 1:
                        if len(group) < n or len(set(rows.rungs[begin : begin + n])) > 1:
                            continue  # a group that has lost some of its rows
                    else:
                        group, begin = [values[row]], row
                    wanted = packed(np.stack(group, 1), chain, side)
                    at = begin - first
                    np.testing.assert_array_equal(found[:, at : at + n], wanted)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_pages_hold_what_the_chain_of_types_makes_of_rows(data):
    """Random ladders, budgets, texts that share pages, and texts that are cut back."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    ladder = data.draw(st.sampled_from(LADDERS))
    pinned = data.draw(PINNED) if ladder[0] == ("f16", "f16") else Pinned()
    exact = {"kv_sink": pinned.sink, "kv_tail": pinned.tail}
    cache = cache_of(ladder, data.draw(st.integers(6, 40)) * F16_PAGE // 10, **exact)
    pool, texts = cache.ladder, [Rows(cache.new_sequence())]
    for _ in range(data.draw(st.integers(1, 14))):
        rows = data.draw(st.sampled_from(texts))
        match data.draw(st.sampled_from(["append", "append", "append", "fork", "cut", "drop"])):
            case "append":
                n = data.draw(st.sampled_from([1, 7, 100, PAGE_TOKENS, 300, 512]))
                n = min(n, cache.n_ctx - rows.sequence.length)
                end = rows.sequence.length + n
                try:
                    if n:
                        append(cache, texts, rows, n, rng)
                except NoPageError:
                    cache.cut_back(rows.sequence, rows.sequence.length)
                    for text in texts:
                        text.follow(pool)
                    if len(texts) == 1:
                        full = end > pool.sizes.room(512) * PAGE_TOKENS
                        assert full, "one text has all of the ladder"
            case "fork" if len(texts) < 3:
                length = data.draw(st.integers(0, rows.sequence.length))
                texts.append(rows.fork(cache.fork(rows.sequence, length)))
            case "cut":
                length = data.draw(st.integers(0, rows.sequence.length))
                cache.truncate(rows.sequence, length)
                rows.cut(length)
            case "drop" if len(texts) > 1:
                cache.truncate(rows.sequence, 0)
                texts.remove(rows)
        for text in texts:
            check(cache, text, rng)
            assert not any(pool.rungs[page] for page in text.sequence.pages[0][: pool.sizes.n_sink])
        held = {page for text in texts for page in text.sequence.pages[0]}
        assert sum(pool.counts()) == len(held)
        assert pool.runs.n_free == pool.sizes.n_units - sum(
            pool.sizes.units[pool.rungs[page]] for page in held
        )


def test_shared_pages_change_once_for_all():
    cache = cache_of(DEFAULT_LADDER, 3 * F16_PAGE)
    rng = np.random.default_rng(0)
    first = Rows(cache.new_sequence())
    append(cache, [first], first, 2 * PAGE_TOKENS, rng)
    second = first.fork(cache.fork(first.sequence, 2 * PAGE_TOKENS))
    append(cache, [first, second], first, PAGE_TOKENS, rng)
    append(cache, [first, second], second, PAGE_TOKENS, rng)
    shared = first.sequence.pages[0][:2]
    assert shared == second.sequence.pages[0][:2]
    pages = {*first.sequence.pages[0], *second.sequence.pages[0]}
    assert cache.requantised.n_pages == sum(cache.ladder.rungs[page] for page in pages)
    assert all(cache.ladder.rungs[page] for page in shared)
    for rows in (first, second):
        check(cache, rows, rng)


def test_pages_go_down_a_little_before_the_next_is_needed():
    cache = cache_of(DEFAULT_LADDER, 2 * F16_PAGE, arrays=NumpyArrays(), n_sequences=1)
    sequence = cache.new_sequence()
    counts = []
    for _ in range(5 * PAGE_TOKENS):
        before = cache.requantised.n_pages
        cache.batch([(sequence, [0])], generated=True)
        sequence.length += 1
        counts.append(cache.requantised.n_pages - before)
    assert max(counts) <= 2
    assert sum(counts) == cache.requantised.n_pages > 3


def test_pages_of_a_tail_and_a_sink_stay_f16():
    cache = cache_of(DEFAULT_LADDER, 5 * F16_PAGE, n_ctx=4096, kv_tail=300, kv_sink=4)
    rng, rows = np.random.default_rng(2), Rows(cache.new_sequence())
    room = cache.ladder.sizes.room(512)
    for n in [100] * 20:
        append(cache, [rows], rows, min(n, room * PAGE_TOKENS - rows.sequence.length), rng)
        rungs = [cache.ladder.rungs[page] for page in rows.sequence.pages[0]]
        assert not rungs[0]
        assert not any(rungs[max(0, rows.sequence.length - 300) // PAGE_TOKENS :])
    assert len(rungs) == room
    assert max(rungs) == len(DEFAULT_LADDER) - 1
    check(cache, rows, rng)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(LADDERS),
    st.integers(10, 60),
    st.integers(1, 3),
    PINNED,
    st.sampled_from([100, 512]),
    st.data(),
)
def test_texts_together_have_the_room_that_is_told(ladder, tenths, n_texts, pinned, n_batch, data):
    n_ctx = 3 * PAGE_TOKENS + 7
    exact = {"kv_sink": pinned.sink, "kv_tail": pinned.tail}
    cache = cache_of(ladder, tenths * F16_PAGE // 10, n_ctx=n_ctx, n_sequences=n_texts, **exact)
    sizes = cache.ladder.sizes
    left = sizes.room_together(n_texts, n_ctx, n_batch)
    assert left >= min(n_ctx, sizes.room(n_batch) * PAGE_TOKENS)
    texts = list[tuple[Sequence, int]]()
    while left:
        texts.append((cache.new_sequence(), min(left, n_ctx)))
        left -= texts[-1][1]
    held = list(texts)  # a cache takes pages down only of sequences that somebody still holds
    while texts:
        sequence, end = data.draw(st.sampled_from(texts))
        n = min(sizes.batch(n_batch), end - sequence.length)
        cache.batch([(sequence, [0] * n)])
        sequence.length += n
        if sequence.length == end:
            texts.remove((sequence, end))
    assert all(sequence.length == end for sequence, end in held)


def test_a_page_that_went_down_comes_back_for_the_tokens_of_a_tail():
    cache = cache_of(DEFAULT_LADDER, 5 * F16_PAGE, n_ctx=4096, kv_tail=64)
    rng, rows = np.random.default_rng(3), Rows(cache.new_sequence())
    append(cache, [rows], rows, 7 * PAGE_TOKENS, rng)
    assert cache.ladder.rungs[rows.sequence.pages[0][2]] > 0
    length = 2 * PAGE_TOKENS + 100
    cache.truncate(rows.sequence, length)
    rows.cut(length)
    append(cache, [rows], rows, 5, rng)
    assert cache.ladder.rungs[rows.sequence.pages[0][2]] == 0
    check(cache, rows, rng)


@pytest.mark.parametrize("n", [1, 500])
def test_a_page_that_went_down_does_not_take_a_batch_with_it(n):
    cache = cache_of(DEFAULT_LADDER, 3 * F16_PAGE, n_sequences=1)
    rng, rows = np.random.default_rng(4), Rows(cache.new_sequence())
    append(cache, [rows], rows, 8 * PAGE_TOKENS, rng)
    assert cache.ladder.rungs[rows.sequence.pages[0][0]] > 0
    cache.truncate(rows.sequence, 2)
    rows.cut(2)
    append(cache, [rows], rows, n, rng)
    assert not any(cache.ladder.rungs[page] for page in rows.sequence.pages[0])
    check(cache, rows, rng)


def test_a_text_that_begins_like_another_is_not_kept_down_by_it():
    cache = cache_of(DEFAULT_LADDER, 4 * F16_PAGE)
    rng, first = np.random.default_rng(6), Rows(cache.new_sequence())
    append(cache, [first], first, 8 * PAGE_TOKENS, rng)
    assert cache.ladder.rungs[first.sequence.pages[0][1]] == 2
    second = first.fork(cache.fork(first.sequence, PAGE_TOKENS + 7))
    append(cache, [first, second], second, 20, rng)
    assert cache.ladder.rungs[second.sequence.pages[0][1]] == 1
    assert second.sequence.pages[0][0] == first.sequence.pages[0][0]
    for rows in (first, second):
        check(cache, rows, rng)


def test_a_page_that_comes_back_on_another_rung_is_not_the_one_before():
    """Tokens that follow go where those before went, unless their page was taken again."""
    cache = cache_of(DEFAULT_LADDER, 8 << 20)
    sequence = cache.new_sequence()
    cache.reserve(sequence, 10)
    sequence.length = 10
    before = list(sequence.pages[0])
    steady = SteadyRows(cache, sequence, 1)
    assert steady.hold(sequence)
    cache.truncate(sequence, 0)
    sequence.pages[0].append(cache.ladder.take_on(1))
    sequence.length = 10
    assert sequence.pages[0] == before
    assert not steady.hold(sequence)


def test_the_end_of_the_ladder_is_a_full_cache():
    cache = cache_of(BY_ROW, F16_PAGE, arrays=NumpyArrays())
    sequence = cache.new_sequence()
    room = cache.ladder.n_pages * PAGE_TOKENS
    for _ in range(cache.ladder.n_pages):
        cache.batch([(sequence, [0] * PAGE_TOKENS)])
        sequence.length += PAGE_TOKENS
    assert sequence.length == room
    with pytest.raises(NoPageError, match="last types of the ladder"):
        cache.batch([(sequence, [0])])


@pytest.mark.parametrize("ladder", LADDERS)
def test_kernels_repack_pages_as_the_reference_does(ladder):
    rng = np.random.default_rng(1)
    arrays = NumpyArrays()
    cache = cache_of(ladder, 3 * F16_PAGE, arrays=arrays)
    (layer, *_), first = cache.layers, cache.layouts[0].segments[0]
    for side in "kv":
        fmt = FORMATS[getattr(first, f"type_{side}")]
        rows = fmt.codec.encode(rng.standard_normal((1, 2, PAGE_TOKENS, 64), np.float32))
        for j, plane in enumerate(getattr(layer.segments[0], side)):
            plane[1:2] = arrays.pages_of_rows(fmt, side, j, rows[j])
    for source, target in pairwise(layer.segments):
        arena = next(iter(cache._arenas.arenas.values()))
        before = arena.copy()
        repack_page(arrays, source, target, 1)
        wanted = [plane[1].copy() for plane in (*target.k, *target.v)]
        arena[:] = before
        arrays.repack_page(source, target, 1)
        for found, plane in zip(wanted, (*target.k, *target.v), strict=True):
            np.testing.assert_array_equal(found, plane[1])
