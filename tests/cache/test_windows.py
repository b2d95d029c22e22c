"""Layers with a window keep what later tokens see, and give the other pages back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localkv.arch.spec import CacheGroup
from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import PAGE_TOKENS, GroupLayout, SegmentSpec, cache_bytes, pages_across
from localkv.cache.pages import PagePool, Sequence
from localkv.errors import LocalKVError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.kernels.reference.torch_arrays import TorchArrays
from localkv.loader.weights import load_model
from support.forward import new_cache
from support.random_model import VARIANTS, variant

WINDOWS = [1, 7, 100, 256, 257, 400]


def layouts(window: int, *firsts: int) -> list[GroupLayout]:
    """The layouts of two layers, one of which has a window."""
    specs = tuple(SegmentSpec("f16", "f16", first) for first in firsts or (0,))
    groups = CacheGroup(1, 1, 1, 0, (0,)), CacheGroup(1, 1, 1, window, (1,))
    return [GroupLayout(group, specs) for group in groups]


def small_cache(window: int, *firsts: int, n_ctx: int = 3000, **options: int) -> KVCache:
    return KVCache(layouts(window, *firsts), n_ctx=n_ctx, arrays=TorchArrays(), **options)


def advance(cache: KVCache, sequence: Sequence, n_tokens: int) -> None:
    cache.batch([(sequence, [0] * n_tokens)])
    sequence.length += n_tokens


def held_rows(pool: PagePool, sequence: Sequence) -> set[int]:
    """Positions of the sequence's rows that the pages of a pool hold."""
    gone, end = sequence.gone[pool.index], min(sequence.length, pool.end)
    rows = range(pool.first, end)
    return {row for row in rows if (row - pool.first) // PAGE_TOKENS not in gone}


def can_go_on(cache: KVCache, sequence: Sequence, length: int) -> bool:
    """Whether all rows are there that the token at position `length`, or a later one, sees, and
    the page that its own row comes to."""
    for pool in cache.pools:
        window = pool.layout.group.window
        first = max(0, length - window + 1) if window else 0
        if (length - pool.first) % PAGE_TOKENS:  # begun by the row before, however short the window
            first = min(first, length - 1)
        wanted = range(max(first, pool.first), min(length, pool.end))
        if not held_rows(pool, sequence).issuperset(wanted):
            return False
    return True


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["grow", "grow", "grow", "cut", "checkpoint"]),
        st.integers(1, 3000),
    ),
    max_size=30,
)


@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # of a machine that is busy
)
@given(
    steps=STEPS,
    window=st.sampled_from(WINDOWS),
    firsts=st.sampled_from([(0,), (0, 4), (0, 256, 900)]),
    n_batch=st.sampled_from([1, 64, 512]),
)
def test_no_page_is_lost_or_shared_and_none_that_is_needed_is_given_back(
    steps: list[tuple[int, str, int]], window: int, firsts: tuple[int, ...], n_batch: int
) -> None:
    cache = small_cache(window, *firsts, n_batch=n_batch, n_sequences=2)
    sequences = [cache.new_sequence() for _ in range(2)]
    for index, action, amount in steps:
        sequence = sequences[index]
        if action == "grow":
            amount = min(amount, cache.n_ctx - sequence.length)
            for at in range(0, amount, n_batch):
                if at > 20 * n_batch:
                    break
                advance(cache, sequence, min(n_batch, amount - at))
        elif action == "checkpoint":
            cache.checkpoint(sequence)
        else:
            longest = min(amount, sequence.length)
            expected = next(n for n in range(longest, -1, -1) if can_go_on(cache, sequence, n))
            assert cache.cut_back(sequence, amount) == sequence.length == expected
        for i, pool in enumerate(cache.pools):
            taken = [page for s in sequences for page in s.held(i)]
            assert sorted(taken + pool.free) == list(range(pool.n_pages))
            for s in sequences:
                assert len(s.held(i)) <= pool.most
                assert len(s.pages[i]) == pool.n_places(s.length)
                assert all(s.pages[i][place] == 0 for place in s.gone[i])
        assert all(can_go_on(cache, s, s.length) for s in sequences)


@pytest.mark.parametrize("window", [128, 512, 1024])
def test_one_can_go_back_to_the_end_of_the_prompt_however_long_the_answer(window: int) -> None:
    n_ctx, n_batch = 9000, 512
    cache = small_cache(window, n_ctx=n_ctx, n_batch=n_batch)
    sequence = cache.new_sequence()
    for _ in range(9):
        advance(cache, sequence, 500)
    cache.checkpoint(sequence)
    while sequence.length < n_ctx:
        advance(cache, sequence, 2)
    assert cache.cut_back(sequence, 4500 - PAGE_TOKENS) == 4500 - PAGE_TOKENS
    assert cache.cut_back(sequence, 1000) == 0


def test_a_wide_window_is_not_kept_twice_and_says_so() -> None:
    """Its pages are for the window and a batch; what is needed goes before the checkpoint."""
    cache = small_cache(1500, n_ctx=5000, n_batch=512)
    assert cache.pools[1].n_pages == pages_across(1499 + 512)
    sequence = cache.new_sequence()
    for _ in range(4):
        advance(cache, sequence, 500)
    cache.checkpoint(sequence)
    for _ in range(4):
        advance(cache, sequence, 500)
    assert cache.cut_back(sequence, 2000) < 2000
    for _ in range(8):
        advance(cache, sequence, 500)
    with pytest.raises(ValueError, match="rows before position"):
        cache.truncate(sequence, 2000)


def test_decoding_ahead_keeps_what_its_reader_may_come_back_to() -> None:
    """The row of position 768 is stored, but its reader stops and goes on from there; the window
    begins at a page's last row."""
    cache = small_cache(257, n_ctx=1000, n_batch=1)
    sequence = cache.new_sequence()
    for _ in range(767):
        advance(cache, sequence, 1)
    cache.reserve(sequence, 769, 767)
    assert 2 * PAGE_TOKENS - 1 == 767 - 257 + 1
    assert cache.cut_back(sequence, 767) == 767


def test_a_batch_is_no_longer_than_the_cache_was_made_for() -> None:
    cache = small_cache(7, n_batch=32)
    with pytest.raises(LocalKVError, match="33 tokens do not fit a batch of 32"):
        advance(cache, cache.new_sequence(), 33)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("n_batch", [1, 32, 512])
def test_bytes_are_bounded_by_the_window(window: int, n_batch: int) -> None:
    sizes = [cache_bytes(layouts(window)[1:], n_ctx=n, n_batch=n_batch) for n in (5000, 1 << 17)]
    assert sizes[0] == sizes[1]
    cache = small_cache(window, n_ctx=5000, n_batch=n_batch, n_sequences=3)
    counted = cache_bytes(layouts(window), n_ctx=5000, n_batch=n_batch, n_sequences=3)
    assert (cache.n_bytes("k"), cache.n_bytes("v")) == counted
    rows = cache.pools[1].most * PAGE_TOKENS
    assert rows <= max(window + n_batch + 2 * PAGE_TOKENS, 2 * window + 5 * PAGE_TOKENS)
    full = [GroupLayout(one.group, one.segments, keeps_all=True) for one in layouts(window)]
    assert cache_bytes(full, n_ctx=5000, n_batch=n_batch) == cache_bytes(full, n_ctx=5000)


def test_more_context_never_takes_fewer_bytes() -> None:
    for window in WINDOWS:
        sizes = [layouts(window)[1].most_pages(n_ctx, n_batch=512) for n_ctx in range(1, 6000, 37)]
        assert all(less <= more for less, more in pairwise(sizes))


# -- what the kernels read

BACKENDS = {"cpu": cpu_backend, "reference": reference_backend}


def logits_of(
    path: Path, backend: Backend, ids: list[int], chunks: list[int], n_batch: int | None
) -> list[bytes]:
    """Logits after each chunk; one of a single token counts as generated."""
    model, _ = load_model(path, backend)
    cache = new_cache(model, SegmentSpec("q8_0", "q5_1"), n_ctx=2048, n_batch=n_batch)
    sequence, found = cache.new_sequence(), []
    for n in chunks:
        at = sequence.length
        batch = cache.batch([(sequence, ids[at : at + n])], generated=n == 1)
        found.append(backend.arrays.to_numpy(model.forward(batch, cache)).copy())
        sequence.length += n
    assert np.isfinite(found).all()
    assert n_batch is None or any(sequence.gone)
    return [row.tobytes() for row in found]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [7, pytest.param(300, marks=pytest.mark.slow)])
def test_logits_are_the_same_bytes_as_with_all_rows(
    tmp_path: Path, backend: str, window: int
) -> None:
    """Over several windows' and pages' length, in prompts and in generated tokens; pages that are
    given back are filled with NaN."""
    settings = {**VARIANTS["gemma3"]["settings"], "attention.sliding_window": window}
    path = variant("gemma3", settings=settings).write(tmp_path / "model.gguf")
    ids = np.random.default_rng(3).integers(96, size=2012).tolist()
    chunks = [200] * 5 + [1] * 6 + [200] * 5 + [1] * 6
    made = BACKENDS[backend]()
    kept = logits_of(path, made, ids, chunks, None)
    assert logits_of(path, made, ids, chunks, 200) == kept


def test_a_prompt_in_any_chunks_gives_the_same_bytes(tmp_path: Path) -> None:
    path = variant("gemma3").write(tmp_path / "model.gguf")
    backend = cpu_backend()
    ids = np.random.default_rng(4).integers(96, size=1400).tolist()
    whole = logits_of(path, backend, ids, [1400], None)
    for size in (28, 280):
        assert logits_of(path, backend, ids, [size] * (1400 // size), size)[-1] == whole[-1]


def test_several_sequences_in_a_batch(tmp_path: Path) -> None:
    """Each gives the same bytes as alone, though they share a pool of pages."""
    path = variant("gemma3").write(tmp_path / "model.gguf")
    model, _ = load_model(path, cpu_backend())
    spec = SegmentSpec("q8_0", "q4_0")
    rng = np.random.default_rng(5)
    texts = [rng.integers(96, size=n).tolist() for n in (1700, 1640, 320)]

    def run(cache: KVCache, texts: list[list[int]]) -> np.ndarray:
        sequences = [cache.new_sequence() for _ in texts]
        for part in range(10):
            parts = []
            for sequence, ids in zip(sequences, texts, strict=True):
                n = len(ids) // 10
                parts.append((sequence, ids[part * n : part * n + n]))
            out = model.forward(cache.batch(parts), cache)
            for sequence, ids in parts:
                sequence.length += len(ids)
        assert any(sequences[0].gone) == (len(texts[0]) > 1280)
        return np.array(out)

    together = run(new_cache(model, spec, n_ctx=1800, n_batch=170, n_sequences=3), texts)
    for row, ids in zip(together, texts, strict=True):
        assert (
            row.tobytes()
            == run(new_cache(model, spec, n_ctx=1800, n_batch=170), [ids])[0].tobytes()
        )


def test_a_cut_back_sequence_goes_on_as_a_fresh_one(tmp_path: Path) -> None:
    path = variant("gemma3").write(tmp_path / "model.gguf")
    model, _ = load_model(path, cpu_backend())
    ids = np.random.default_rng(6).integers(96, size=1900).tolist()

    def feed(cache: KVCache, sequence: Sequence, ids: list[int]) -> np.ndarray:
        for at in range(0, len(ids), 100):
            part = ids[at : at + 100]
            out = model.forward(cache.batch([(sequence, part)]), cache)
            sequence.length += len(part)
        return np.array(out)

    cache = new_cache(model, SegmentSpec("q8_0", "q8_0"), n_ctx=2048, n_batch=100)
    sequence = cache.new_sequence()
    feed(cache, sequence, ids[:600])
    cache.checkpoint(sequence)
    feed(cache, sequence, ids[600:])
    assert any(sequence.gone)
    assert cache.cut_back(sequence, 580) == 580
    other = [(token + 1) % 96 for token in ids[580:700]]
    again = feed(cache, sequence, other)
    fresh = new_cache(model, SegmentSpec("q8_0", "q8_0"), n_ctx=2048, n_batch=100)
    expected = feed(fresh, fresh.new_sequence(), ids[:580] + other)
    assert again.tobytes() == expected.tobytes()
