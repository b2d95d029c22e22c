"""On the CPU a token's logits do not depend on the tokens that it is evaluated with, bit for bit.

What may matter is what a token sees and its kind: a prompt's tokens and generated ones have kernels
of their own. The number of tokens, their chunks, other sequences, the order of pages, what memory
held before and the number of threads may not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from localkv.cache.kv_cache import KVCache
from localkv.cache.layout import SegmentSpec, Tail, tail_segments
from localkv.config import CacheConfig
from localkv.engine.batch_engine import BatchEngine
from localkv.engine.engine import Engine
from localkv.engine.generation import GenerationOptions
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.synthetic import synthetic_model
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quant_formats import FORMATS
from localkv.system.threads import n_threads, use_threads
from support.cache_types import NAMES, PAIRS, scales_of
from support.counting_sampler import CountingSampler
from support.dense_variants import DENSE, dense_variant
from support.expert_models import EXPERT_MODELS
from support.forward import new_cache, with_params
from support.quick import in_turn, quick
from support.random_model import VARIANTS, variant

WEIGHTS = [name for name, fmt in FORMATS.items() if fmt.is_weight]
N_PROMPT, N_GENERATED = 300, 12
"""More than a page; more than a decode kernel takes at once."""


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = n_threads()
    use_threads(n)
    try:
        yield
    finally:
        use_threads(before)


def random_cache(model: Transformer, rng: random.Random, *segments: SegmentSpec) -> KVCache:
    """One for several sequences, full of NaN, with pages in no order."""
    scales = scales_of(model.config, 30.0, 10.0)
    cache = new_cache(model, *segments, n_ctx=1536, n_sequences=3, kv_scales=scales)
    for pool in cache.pools:
        rng.shuffle(pool.free)
    return cache


def cut(ids: list[int], rng: random.Random, sizes: tuple[int, ...]) -> Iterator[list[int]]:
    at = 0
    while at < len(ids):
        size = rng.choice(sizes)
        yield ids[at : at + size]
        at += size


def logits(
    model: Transformer,
    cache: KVCache,
    prompt: list[list[int]],
    generated: list[list[int]],
    company: bool = False,
) -> np.ndarray:
    """The logits of all positions: the bits of float32 [tokens, n_vocab].

    With `company` each batch has another sequence before and one behind, of both kinds.
    """
    sequence, *others = (cache.new_sequence() for _ in range(3))
    out = []
    for i, (ids, kind) in enumerate(
        [*((p, False) for p in prompt), *((g, True) for g in generated)]
    ):
        parts, kinds = [(sequence, ids)], [kind]
        if company:
            sizes = (1 + i % 3, 1 + i * 5 % 13)
            before, behind = ((s, [7 * i % 90] * n) for s, n in zip(others, sizes, strict=True))
            parts, kinds = [before, *parts, behind], [i % 2 == 0, kind, i % 3 == 0]
        first = len(parts[0][1]) if company else 0
        batch = cache.batch(parts, logits="all", generated=kinds)
        out.append(model.forward(batch, cache)[first : first + len(ids)].copy())
        for part, new in parts:
            part.length += len(new)
    for part in (sequence, *others):
        cache.truncate(part, 0)
    return np.concatenate(out).view(np.int32)


def check(
    model: Transformer, rng: random.Random, *segments: SegmentSpec, n: int = N_PROMPT
) -> None:
    """A prompt at once and then one token after the other, against all that should be the same."""
    cache = random_cache(model, rng, *segments)
    ids = [rng.randrange(90) for _ in range(n + N_GENERATED)]
    prompt, generated = ids[:n], ids[n:]
    one_by_one = [[token] for token in generated]
    want = logits(model, cache, [prompt], one_by_one)
    assert np.isfinite(want.view(np.float32)).all()

    def same(what: str, got: np.ndarray) -> None:
        rows = np.flatnonzero((got != want).any(1)).tolist()
        assert not rows, f"{what}: positions {rows[:10]} of {len(want)} differ"

    few = cut(prompt, rng, (1, 2, 3, 5, 17, 40, 120))
    same("small chunks", logits(model, cache, list(few), [generated]))
    some = list(cut(generated, rng, (1, 2, 3, 5)))
    with threads(2):
        chunks = list(cut(prompt, rng, (64, 100, 257)))
        same("company", logits(model, cache, chunks, some, company=True))


def pair_of(name: str) -> tuple[str, str]:
    """A pair of cache types that goes with a type of weights, all of them in turn."""
    return PAIRS[WEIGHTS.index(name) * 7 % len(PAIRS)]


@pytest.mark.parametrize(
    ("name", "shape"),
    quick(
        product(WEIGHTS, ("llama-tiny", "moe-tiny")),
        {*product(WEIGHTS[::2], ("llama-tiny",))},
        in_turn(WEIGHTS, ("llama-tiny", "moe-tiny")),
    ),
)
def test_types_of_weights(name: str, shape: str) -> None:
    model = synthetic_model(shape, name, cpu_backend())
    check(model, random.Random(name), SegmentSpec(*pair_of(name)))


@pytest.fixture(scope="module")
def tiny() -> Transformer:
    return synthetic_model("llama-tiny", "q8_0", cpu_backend())


@pytest.mark.parametrize(("type_k", "type_v"), [(name, name) for name in NAMES])
def test_one_type_of_the_cache(tiny: Transformer, type_k: str, type_v: str) -> None:
    check(tiny, random.Random(type_k), SegmentSpec(type_k, type_v))


@pytest.mark.slow
@pytest.mark.parametrize(("type_k", "type_v"), PAIRS)
def test_types_of_the_cache(tiny: Transformer, type_k: str, type_v: str) -> None:
    rotation = 32 if (NAMES.index(type_k) + NAMES.index(type_v)) % 2 else 0
    check(tiny, random.Random(type_k + type_v), SegmentSpec(type_k, type_v, rotation_k=rotation))


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_of_the_graph(name: str, tmp_path: Path) -> None:
    """Widths that are no multiples of 16 among them, which kernels do not take."""
    model, _ = load_model(
        open_gguf(variant(name, n_ff=168).write(tmp_path / "m.gguf")), cpu_backend()
    )
    types = ("f16", "f16") if model.config.groups[0].key_dim % 32 else ("q8_0", "q5_1")
    check(model, random.Random(name), SegmentSpec(*types))


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_architectures_without_experts(name: str, tmp_path: Path) -> None:
    path = dense_variant(name).write(tmp_path / "m.gguf")
    model, _ = load_model(open_gguf(path), cpu_backend())
    types = ("f16", "f16") if model.config.groups[0].key_dim % 32 else ("q8_0", "q5_1")
    check(model, random.Random(name), SegmentSpec(*types))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_architectures_with_experts(name: str, tmp_path: Path) -> None:
    path = EXPERT_MODELS[name].write(tmp_path / "m.gguf")
    model, _ = load_model(open_gguf(path), cpu_backend())
    check(model, random.Random(name), SegmentSpec("q8_0", "q5_1"), n=100)


@pytest.mark.parametrize(
    ("window", "group"), quick(product((0, 9, 260), (1, 3, 16, 23)), {(0, 3), (260, 1), (260, 23)})
)
def test_groups_windows_and_segments(group: int, window: int, tmp_path: Path) -> None:
    path = variant("llama", n_heads=2 * group, head_dim=32, n_kv_heads=2).write(tmp_path / "m.gguf")
    model, _ = load_model(open_gguf(path), cpu_backend())
    model = with_params(model, window=window, softcap=30.0)
    rng = random.Random(group * 1000 + window)
    segments = (SegmentSpec("f16", "f16"), SegmentSpec("q4_0", "q8_0", first_position=40))
    check(model, rng, *segments)
    check(model, rng, SegmentSpec("q8_0", "q4_1"), n=256 * 5 - 6)


@pytest.mark.parametrize(
    ("window", "type_k", "type_v"),
    [(0, "q4_1c", "q4_1"), pytest.param(9, "q4_0", "q8_0", marks=pytest.mark.slow)],
)
def test_tails(window: int, type_k: str, type_v: str, tmp_path: Path) -> None:
    """The first rows and the newest ones as f16; others packed one by one and in groups."""
    path = variant("llama", n_heads=6, head_dim=64, n_kv_heads=2).write(tmp_path / "m.gguf")
    model = with_params(load_model(open_gguf(path), cpu_backend())[0], window=window)
    tail = Tail(4, 50, FORMATS[type_k].group_tokens)
    packed = SegmentSpec(type_k, type_v, 4, 0, 64, tail)
    check(model, random.Random(1), SegmentSpec("f16", "f16"), packed, *tail_segments(tail))


@pytest.mark.parametrize(
    ("window", "types", "tail"),
    [
        (0, ("f16", "f16"), 0),
        (9, ("q8_0", "q4_0"), 0),
        (300, ("f16", "f16"), 0),
        (0, ("q4_1c", "q4_1"), 50),
    ],
)
def test_a_prompt_and_what_follows_in_one_batch(
    window: int, types: tuple[str, str], tail: int, tmp_path: Path
) -> None:
    path = variant("llama", n_heads=6, head_dim=64, n_kv_heads=2).write(tmp_path / "m.gguf")
    model = with_params(load_model(open_gguf(path), cpu_backend())[0], window=window)
    cache = CacheConfig(*types, n_ctx=1024, kv_tail=tail or None)
    rng, n, n_batch = random.Random(window), 700, 64
    ids = [rng.randrange(90) for _ in range(n)]
    for n_prompt in (1, 2, 40, 64, 65, 600):
        engine = Engine(model, cache, n_batch=n_batch)
        for start in range(0, n_prompt, n_batch):
            last = engine.evaluate(ids[start : min(start + n_batch, n_prompt)]).copy()
        more = [engine.evaluate([token], generated=True).copy() for token in ids[n_prompt:]]
        want = np.concatenate([last, *more]).view(np.int32)
        sizes = {"first": n_prompt - 1, "n_prompt": n_prompt}
        again = Engine(model, cache, n_batch=n_batch).logit_batches(ids, **sizes)
        parts = [part.copy() for part in again]
        assert np.array_equal(np.concatenate(parts).view(np.int32), want), n_prompt
        assert len(parts) == -(-n // n_batch) - (n_prompt - 1) // n_batch


def seen(engine: Engine, prompt: list[int], n: int) -> list[bytes]:
    """The logits that a generation draws its tokens by."""
    sampler = CountingSampler(engine.model.config.n_vocab)
    list(BatchEngine(engine).generate(prompt, GenerationOptions(sampler=sampler, max_tokens=n)))
    return [logits.tobytes() for logits in sampler.seen]


@pytest.mark.parametrize(("type_k", "type_v"), PAIRS[::9])
def test_what_ran_before(tiny: Transformer, type_k: str, type_v: str) -> None:
    """Prompts that begin with one another and with what was generated, in any order and chunks."""
    rng = random.Random(type_k + type_v)
    cache = CacheConfig(
        type_k, type_v, n_ctx=1024, kv_scales=scales_of(tiny.config, absmax_k=30.0, absmax_v=10.0)
    )
    texts = [[rng.randrange(90) for _ in range(60)]]
    engine = Engine(tiny, cache)
    for _ in range(12):
        start = rng.choice(texts)
        start = start[: rng.randrange(1, len(start) + 1)]
        prompt = start + [rng.randrange(90) for _ in range(rng.choice((0, 1, 2, 40)))]
        engine.n_batch = engine.slot.n_batch = rng.choice((1, 2, 7, 33, 512))
        got = seen(engine, prompt, 6)
        assert got == seen(Engine(tiny, cache), prompt, 6)
        texts.append(engine.cached_ids.copy())


def test_answers_may_be_kept_as_they_were_written(tiny: Transformer) -> None:
    """What `exact=False` is faster by: only the last token of a text is evaluated again."""
    cache = CacheConfig("q8_0", "q4_0", n_ctx=512)
    for exact, n_reused in ((True, 40), (False, 47)):
        engine = Engine(tiny, cache, exact=exact)
        first = list(
            BatchEngine(engine).generate(
                [7] * 40, GenerationOptions(sampler=CountingSampler(512), max_tokens=8)
            )
        )
        again = BatchEngine(engine).generate(
            [7] * 40 + first, GenerationOptions(sampler=CountingSampler(512), max_tokens=1)
        )
        list(again)
        assert again.stats.n_reused == n_reused
