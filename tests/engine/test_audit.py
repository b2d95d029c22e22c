"""What a packed cache changed: bounds of a divergence, the second reading, and its places."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv import LLM
from localkv.config import CacheConfig
from localkv.engine.audit import (
    Audit,
    CancelledReadingError,
    SecondReading,
    compare_kept,
    compare_logits,
    long_batch,
)
from localkv.engine.cache_slot import CacheSlot
from localkv.engine.logprobs import Logits, Prediction, Predictions, log_softmax, score
from localkv.errors import DoesNotFitError, LocalKVError, UsageError
from localkv.quality.scores import base_cache, score_chunks
from support.paths import MODELS
from support.program import Program

sys.path.insert(0, str(MODELS))

from outliers import Outliers, write_twin

PROMPT = "Once upon a time"
F16 = MODELS / "tales-4M-F16.gguf"


@pytest.fixture(scope="module")
def packed() -> LLM:
    return LLM(F16, n_ctx=512, cache_type_k="q4_0", cache_type_v="q4_0")


def audited(llm: LLM, **options: object) -> Audit:
    found = llm.complete(PROMPT, audit=True, ignore_eos=True, **options).audit
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    n_vocab=st.integers(2, 300),
    spread=st.floats(0.01, 30),
    noise=st.floats(0, 3),
    most=st.integers(1, 300),
)
def test_the_divergence_lies_between_its_bounds(
    seed: int, n_vocab: int, spread: float, noise: float, most: int
) -> None:
    random = np.random.default_rng(seed)
    base = random.normal(0, spread, (5, n_vocab)).astype(np.float32)
    ours = (base + random.normal(0, noise, base.shape)).astype(np.float32)
    tokens = random.integers(n_vocab, size=5)
    kept = Predictions(most)
    for row, token in zip(ours, tokens, strict=True):
        kept.add(row, int(token))
    found, exact = compare_kept(base, kept[:]), compare_logits(base, ours, tokens)
    slack = 1e-5 + 1e-5 * exact.kld
    assert (found.kld <= exact.kld + slack).all()
    assert (exact.kld <= found.kld_most + slack).all()
    assert np.array_equal(found.best, ours.argmax(1))
    assert np.array_equal(found.best_base, base.argmax(1))
    assert found.nll == pytest.approx(exact.nll, abs=1e-4)
    assert found.nll_base == pytest.approx(exact.nll_base)
    assert found.p_best == pytest.approx(exact.p_best, rel=1e-5)


def test_nothing_is_left_out_where_all_tokens_are_kept() -> None:
    random = np.random.default_rng(1)
    base, ours = random.normal(0, 2, (2, 4, 50)).astype(np.float32)
    kept = Predictions()
    for row in ours:
        kept.add(row, 0)
    found = compare_kept(base, kept[:])
    assert found.kld == pytest.approx(score(ours, np.zeros(4, np.int64), base).kld, abs=1e-6)
    assert np.array_equal(found.kld, found.kld_most)


def plain_bounds(base: Logits, one: Prediction) -> tuple[float, float]:
    """The least and the most that a token's divergence can be, in float64, term by term."""
    log_p = log_softmax(base[None])[0]
    p = np.exp(log_p)
    rest = np.setdiff1d(np.arange(len(base)), one.ids)
    ours = one.shifted.astype(np.float64) - one.log_total
    least = most = float((p[one.ids] * (log_p[one.ids] - ours)).sum())
    if mass := float(p[rest].sum()):
        least += mass * (np.log(mass) - max(one.tail, one.least))
        most += float((p[rest] * (log_p[rest] - one.least)).sum())
    return max(0.0, least), max(0.0, least, most)


@pytest.mark.parametrize(
    ("n_tokens", "n_vocab", "most"),
    [(1, 2, 1), (300, 40, 7), (3, 300_000, 1024), (130, 1024, 2000)],
)
def test_blocks_of_tokens_are_compared_as_each_alone(
    n_tokens: int, n_vocab: int, most: int
) -> None:
    random = np.random.default_rng(n_vocab)
    base = random.normal(0, 4, (n_tokens, n_vocab)).astype(np.float32)
    kept = Predictions(most)
    for row in base:
        noise = random.normal(0, 0.5, n_vocab).astype(np.float32)
        kept.add(row + noise, int(random.integers(n_vocab)))
    found = compare_kept(base, kept[:])
    bounds = [plain_bounds(row, one) for row, one in zip(base, kept[:], strict=True)]
    least, greatest = np.array(bounds).T
    assert found.kld == pytest.approx(least, rel=1e-4, abs=1e-6)
    assert found.kld_most == pytest.approx(greatest, rel=1e-4, abs=1e-6)
    drawn = [one.token for one in kept[:]]
    assert found.nll_base == pytest.approx(-log_softmax(base)[range(n_tokens), drawn], abs=1e-5)
    assert np.array_equal(found.best_base, base.argmax(1))


@pytest.mark.parametrize("place", ["kept", "not kept", "drawn"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_an_error(value: float, place: str) -> None:
    row = np.linspace(30, 0, 20, dtype=np.float32)
    kept = Predictions()
    kept.add(row, 2)
    assert 0 < len(kept[0:1][0].ids) < 19
    base = row[None].copy()
    base[0, {"kept": 1, "not kept": -1, "drawn": 2}[place]] = value
    with pytest.raises(LocalKVError, match="not finite"):
        compare_kept(base, kept[:])


@pytest.mark.parametrize("drawing", [{"temperature": 0}, {"seed": 3}])
def test_an_f16_cache_has_changed_nothing(drawing: dict[str, float]) -> None:
    """Generated tokens are evaluated as such, so not a bit differs."""
    llm = LLM(F16, n_ctx=512)
    kept = audited(llm, max_tokens=120, **drawing)
    assert (kept.flips, kept.window, kept.is_exact) == ((), None, False)
    assert kept.kld_max < 1e-6
    assert kept.ppl == pytest.approx(kept.ppl_base, rel=1e-6)
    exact = llm.complete(PROMPT, audit="exact", ignore_eos=True, max_tokens=120, **drawing).audit
    assert (exact.flips, exact.kld_max, exact.is_exact) == ((), 0.0, True)
    assert exact.ppl == exact.ppl_base


def test_what_was_kept_is_what_the_cache_gives_again(packed: LLM) -> None:
    options = {"max_tokens": 200, "seed": 5, "ignore_eos": True}
    kept = packed.complete(PROMPT, audit=True, **options).audit
    exact = packed.complete(PROMPT, audit="exact", **options).audit
    names = [(one.at, one.start, one.end, one.base, one.token) for one in exact.flips]
    assert [(one.at, one.start, one.end, one.base, one.token) for one in kept.flips] == names
    for side in ("p", "base_p"):
        theirs = [getattr(one, side) for one in exact.flips]
        assert [getattr(one, side) for one in kept.flips] == pytest.approx(theirs, rel=1e-6)
    assert len(kept.flips) > 0
    assert kept.kld_mean <= exact.kld_mean * 1.0001 + 1e-6
    assert exact.kld_mean <= kept.kld_mean_most * 1.0001 + 1e-6
    assert kept.ppl == pytest.approx(exact.ppl, rel=1e-5)
    assert kept.ppl_base == pytest.approx(exact.ppl_base, rel=1e-6)
    assert exact.kld_mean > 1e-6


def second_reading(
    llm: LLM,
    check_room: Callable[[CacheConfig], object] = lambda cache: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> SecondReading:
    return SecondReading(
        llm.engine.model, llm.cache, n_batch=64, check_room=check_room, is_cancelled=is_cancelled
    )


def test_it_agrees_with_perplexity_on_an_outlier_twin(tmp_path: Path) -> None:
    """Perplexity evaluates all tokens as a prompt's, whose attention rounds no queries."""
    write_twin(F16, tmp_path / "twin.gguf", Outliers())
    llm = LLM(tmp_path / "twin.gguf", n_ctx=256, cache_type_k="q4_0", cache_type_v="q4_0")
    stream = llm.stream(PROMPT, max_tokens=180, seed=2, ignore_eos=True)
    assert stream.completion.audit is None
    ids = stream.generation.ids
    caches = [CacheConfig("q4_0", "q4_0", n_ctx=256)]
    ((scores,),) = score_chunks(llm.engine.model, [ids], caches, base=base_cache(256))
    found = second_reading(llm).compare(ids, len(ids) // 2 + 1, None).compared
    assert len(found.kld) == len(scores.kld) > 80
    assert found.kld.mean() == pytest.approx(scores.kld.mean(), rel=0.1)
    assert found.nll_base == pytest.approx(scores.nll_base, abs=1e-3)
    assert np.corrcoef(found.kld, scores.kld)[0, 1] > 0.95
    assert (found.best == found.best_base).mean() == pytest.approx(scores.same_top.mean(), abs=0.03)


def test_windows_where_memory_has_no_room(packed: LLM) -> None:
    """Both caches see the same window, so what differs is the cache."""

    def check_room(cache: CacheConfig) -> None:
        if cache.n_tokens is not None and cache.n_tokens > 300:
            raise DoesNotFitError("no room")

    ids = list(np.random.default_rng(1).integers(3, 500, 500))
    reading = second_reading(packed, check_room).compare(ids, 40, None)
    assert reading.window == 250
    assert len(reading.compared.kld) == 460
    whole = second_reading(packed).compare(ids, 40, None)
    assert whole.window is None
    first = slice(0, 125)  # of these a window has all the text
    assert np.array_equal(reading.compared.kld[first], whole.compared.kld[first])
    f16 = LLM(F16, n_ctx=512)
    assert second_reading(f16, check_room).compare(ids, 40, None).compared.kld.max() == 0


def test_batches_are_of_one_length(packed: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is a prompt's in them; chains of workers are made for each length."""
    lengths, read_logits = list[int](), CacheSlot.read_logits

    def noted(self: CacheSlot, ids: list[int], *arguments: Any, **sizes: int) -> list[Any]:
        lengths.append(len(ids))
        return read_logits(self, ids, *arguments, **sizes)

    monkeypatch.setattr(CacheSlot, "read_logits", noted)
    ids = list(np.random.default_rng(2).integers(3, 500, 191))
    second_reading(packed).compare(ids, 5, None)
    assert lengths == [64, 64, 64, 64, 62, 62]  # of both caches, in turn
    kept = Predictions()
    for token in ids[70:]:
        kept.add(np.zeros(packed.config.n_vocab, np.float32), int(token))
    lengths.clear()
    second_reading(packed).compare(ids, 70, kept)
    assert lengths == [64, 62]


@pytest.mark.parametrize(
    ("n_batch", "n_embd", "most"), [(512, 256, 1024), (512, 4096, 512), (64, 256, 64)]
)
def test_batches_of_small_models_may_be_longer(n_batch: int, n_embd: int, most: int) -> None:
    assert long_batch(n_batch, n_embd) == most


def test_no_room_for_a_window_either(packed: LLM) -> None:
    def check_room(cache: CacheConfig) -> None:
        raise DoesNotFitError("no room")

    with pytest.raises(DoesNotFitError):
        second_reading(packed, check_room).compare(list(range(3, 400)), 40, None)


def test_it_can_be_cancelled(packed: LLM) -> None:
    looks = iter([False, False, True])
    reading = second_reading(packed, is_cancelled=lambda: next(looks))
    with pytest.raises(CancelledReadingError):
        reading.compare(list(range(3, 400)), 40, None)
    stream = packed.stream(PROMPT, max_tokens=3)
    cancel = Event()
    cancel.set()
    assert packed.audit(stream) is None  # nothing was read of it
    next(stream)
    assert packed.audit(stream, cancel=cancel) is None
    found = packed.audit(stream)
    assert found is not None
    assert found.n_tokens == stream.stats.n_generated == 1


def test_the_text_is_the_same_with_it_and_goes_on(packed: LLM) -> None:
    plain = packed.complete(PROMPT, max_tokens=60, seed=9)
    assert packed.complete(PROMPT, max_tokens=60, seed=9, audit=True).text == plain.text
    stream = packed.stream(PROMPT, max_tokens=60, seed=9)
    pieces = [next(stream) for _ in range(20)]
    assert packed.audit(stream) is not None
    assert "".join([*pieces, *stream]) == plain.text


def test_flips_have_their_places_in_the_text(packed: LLM) -> None:
    stream = packed.stream(PROMPT, max_tokens=300, seed=5, ignore_eos=True, audit=True)
    completion = stream.completion
    assert completion.audit is not None
    assert completion.audit is stream.completion.audit  # not once more
    assert len(completion.audit.flips) > 1
    tokens = stream.generation.ids[stream.stats.n_prompt :]
    for flip in completion.audit.flips:
        before = packed.tokenizer.decode(tokens[: flip.at])
        assert completion.text[flip.start : flip.end] == before[-(flip.end - flip.start) :]
        assert flip.base != flip.token
        assert 0 < flip.p <= 1
        assert f"token {flip.at}: {flip.base!r}" in str(flip)


def test_stop_strings_and_openings_move_no_place(packed: LLM) -> None:
    stream = packed.stream(PROMPT, max_tokens=100, seed=5, stop=["She"], audit=True)
    completion = stream.completion
    assert completion.audit is not None
    assert completion.audit.n_tokens == completion.usage.completion_tokens
    places = stream.places()
    assert "".join(completion.text[start:end] for start, end in places) == completion.text
    assert places[-1][1] == len(completion.text)


def test_many_texts_at_the_same_time(packed: LLM) -> None:
    both = LLM(F16, n_ctx=512, cache_type_k="q4_0", cache_type_v="q4_0", n_parallel=2)
    prompts = [PROMPT, "One day"]
    options = {"max_tokens": 50, "seed": 4, "ignore_eos": True}
    together = both.complete_many(prompts, audit=True, **options)
    for prompt, one in zip(prompts, together, strict=True):
        alone = packed.complete(prompt, audit=True, **options).audit
        assert one.audit is not None
        assert alone is not None
        assert replace(one.audit, seconds=0) == replace(alone, seconds=0)


def test_guessed_tokens_are_audited_as_others(packed: LLM) -> None:
    options = {"max_tokens": 80, "temperature": 0, "ignore_eos": True, "audit": True}
    guessed = packed.complete(PROMPT, spec="ngram", **options).audit
    plain = packed.complete(PROMPT, **options).audit
    assert replace(guessed, seconds=0) == replace(plain, seconds=0)


@pytest.mark.parametrize("value", ["kept", 1.5, None])
def test_other_values_are_refused(packed: LLM, value: object) -> None:
    with pytest.raises(UsageError, match="audit must be True or False or 'exact'"):
        packed.complete(PROMPT, audit=value, max_tokens=1)


def test_the_command(program: Program) -> None:
    arguments = ("complete", "-m", str(F16), "-ctk", "q4_0", "-ctv", "q4_0", "-p", PROMPT)
    arguments += ("-n", "100", "-s", "1", "-q")
    result = program(*arguments, "--audit")
    (line,) = result.err_lines
    assert line.startswith("audit: 2 of 100 tokens with another most likely choice than f16's (")
    assert "token 4: ' cu' 0.11 -> ' kind' 0.10" in line
    assert "PPL 1.5225 with q4_0/q4_0, 1.5284 with f16" in line
    found = json.loads(program(*arguments, "--audit", "exact", "--json").out)["audit"]
    assert found["is_exact"]
    assert [flip["at"] for flip in found["flips"]] == [4, 16]
    assert found["kld_mean"] == found["kld_mean_most"]
    assert "audit" not in json.loads(program(*arguments, "--json").out)
    assert program(*arguments, "--audit", "maybe").code == 2


def test_a_text_without_tokens(program: Program) -> None:
    result = program("complete", "-m", str(F16), "-p", PROMPT, "-n", "0", "-q", "--audit")
    assert result.err_lines == ["audit: there are no tokens"]
