"""A model whose cache has a budget: texts to the full context, states, rollback, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from localkv import LLM
from localkv.errors import LocalKVError, UsageError
from support.paths import MODELS

MODEL = MODELS / "tales-4M-F16.gguf"
THIRD = 2048 * 2560 // 3
"""A third of the bytes of an f16 cache of the shipped model's 2,048 tokens."""
BY_CHANNEL = "f16,q8_0/q8_0,q4_1c/q4_1"
"""The last types pack 32 tokens of K together."""
STORY = "Lily lost her red kite in the park. Tom, a kind fox, found it under the old tree. "


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, device="cpu", kv_budget=THIRD) as model:
        yield model


def ids_of(llm, n):
    return (llm.tokenize(STORY * 100))[:n]


def test_text_goes_on_to_the_full_context_within_the_budget(llm):
    assert llm.cache.n_ctx == 2048
    assert llm.memory.cache_k + llm.memory.cache_v <= THIRD
    done = llm.complete(ids_of(llm, 1900), temperature=0, ignore_eos=True)
    assert done.context_full
    assert done.usage.total_tokens == 2048
    ladder = llm.engine.cache.ladder
    assert ladder is not None
    assert sum(ladder.counts()) >= 8
    assert ladder.counts()[-2] > 0
    assert done.usage.requantised_pages > 0
    assert done.timings.requantise_seconds > 0


@pytest.fixture(scope="module")
def by_channel():
    with LLM(MODEL, device="cpu", kv_budget=THIRD, kv_ladder=BY_CHANNEL) as model:
        yield model


@pytest.mark.parametrize("name", ["llm", "by_channel"])
def test_tokens_are_the_same_with_and_without_the_fast_path(name, request):
    llm = request.getfixturevalue(name)
    ids = ids_of(llm, 600)
    llm.engine.reset()
    fast = llm.complete(ids, max_tokens=300, temperature=0, ignore_eos=True)
    llm.engine.reset()
    steady = llm.engine.slot._next
    llm.engine.slot._next = NoSteadyTokens()
    try:
        slow = llm.complete(ids, max_tokens=300, temperature=0, ignore_eos=True)
    finally:
        llm.engine.slot._next = steady
    assert fast.usage.requantised_pages > 0
    assert slow.text == fast.text


class NoSteadyTokens:
    """Every token is run as a batch."""

    def note(self, *of):
        pass

    def hold(self, *of):
        return False

    def logits(self, *of):
        return None


@pytest.mark.parametrize("ladder", [None, BY_CHANNEL])
def test_kernels_agree_with_the_reference(ladder):
    ids, logits = None, []
    budget = THIRD // 2 if ladder is None else 2 * THIRD // 3
    for device in ("cpu", "reference"):
        with LLM(MODEL, device=device, kv_budget=budget, kv_ladder=ladder, n_batch=128) as model:
            ids = ids or ids_of(model, 600)
            logits.append(model.logits(ids))
            assert model.engine.cache.requantised.n_pages > 0
    np.testing.assert_allclose(logits[0], logits[1], atol=0.25)
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).mean() > 0.98


def test_text_that_was_cut_back_goes_on(llm):
    ids = ids_of(llm, 1200)
    llm.complete(ids, max_tokens=4, temperature=0)
    again = llm.complete([*ids[:700], *ids[:100]], max_tokens=4, temperature=0)
    assert again.usage.cached_tokens == 700


def test_state_goes_on_with_the_same_tokens(llm, tmp_path):
    ids = ids_of(llm, 1300)
    llm.engine.reset()
    llm.complete(ids, max_tokens=1, temperature=0)
    rungs = llm.engine.cache.ladder.counts()
    llm.save_state(tmp_path / "text.state")
    wanted = llm.complete(ids, max_tokens=20, temperature=0)
    with LLM(MODEL, device="cpu", kv_budget=THIRD) as other:
        found = other.load_state(tmp_path / "text.state")
        assert found == ids
        assert other.engine.cache.ladder.counts() == rungs
        again = other.complete(ids, max_tokens=20, temperature=0)
        assert again.usage.cached_tokens == len(ids) - 1
    assert again.text == wanted.text
    with LLM(MODEL, device="cpu") as plain, pytest.raises(UsageError, match="its K and V are"):
        plain.load_state(tmp_path / "text.state")


def test_pages_with_scales_by_channel_go_on_wherever_a_text_is_cut(by_channel, tmp_path):
    llm = by_channel
    ids = ids_of(llm, 1700)
    llm.engine.reset()
    done = llm.complete(ids, temperature=0, ignore_eos=True)
    assert done.usage.total_tokens == llm.cache.n_ctx
    ladder = llm.engine.cache.ladder
    assert ladder.counts()[-1] > 0
    llm.engine.truncate(300)
    pages = llm.engine.sequence.pages[0]
    assert ladder.rungs[pages[-1]] == 2
    llm.save_state(tmp_path / "text.state")
    wanted = llm.complete(ids[:310], max_tokens=20, temperature=0)
    assert wanted.usage.cached_tokens == 300
    assert ladder.rungs[llm.engine.sequence.pages[0][-1]] < 2
    with LLM(MODEL, device="cpu", kv_budget=THIRD, kv_ladder=BY_CHANNEL) as other:
        assert other.load_state(tmp_path / "text.state") == ids[:300]
        again = other.complete(ids[:310], max_tokens=20, temperature=0)
        assert again.usage.cached_tokens == 300
    assert again.text == wanted.text


def test_several_texts_share_a_budget():
    with LLM(MODEL, device="cpu", kv_budget=2 * THIRD, n_parallel=3) as llm:
        texts = [STORY * n for n in (10, 20, 30)]
        done = llm.complete_many(texts, max_tokens=20, temperature=0)
        assert all(one.usage.completion_tokens for one in done)
        assert llm.engine.cache.ladder is not None
        cache = llm.engine.cache
        assert cache.n_bytes("k") + cache.n_bytes("v") <= 2 * THIRD


def test_company_changes_no_bit_before_a_page_changes():
    with LLM(MODEL, device="cpu", n_ctx=256, kv_budget=1 << 26, n_parallel=3) as llm:
        asked = {"max_tokens": 12, "temperature": 0, "logprobs": 3}
        (alone,) = llm.complete_many([STORY], **asked)
        among = llm.complete_many([STORY, STORY * 2, "A cat"], **asked)[0]
        assert llm.engine.cache.requantised.n_pages == 0
    assert among.logprobs == alone.logprobs


def test_texts_that_begin_alike_share_a_page_that_has_no_room_for_a_copy():
    """Page numbers are free where units are not: such texts come one after the other."""
    with LLM(MODEL, device="cpu", n_ctx=512, kv_budget=900_000, n_parallel=3) as llm:
        texts = [n * "Once upon a time " for n in (40, 1, 5, 20, 40, 5, 1, 1, 20)]
        done = llm.complete_many([*texts, *texts], max_tokens=30, temperature=0, ignore_eos=True)
        assert [one.usage.completion_tokens for one in done] == [30] * 18
        assert llm.batch.stats.n_preempted == 0
        assert llm.batch.pages.lost == 0


def test_texts_that_begin_alike_get_copies_where_their_page_has_no_room():
    """A page in f16 that they share, and room for others in q8_0 and below alone."""
    with LLM(MODEL, device="cpu", kv_budget=1 << 20, n_parallel=3) as llm:
        texts = [f"{i} {STORY * n}" for i, n in enumerate([2, 12, 25, 40])]
        done = llm.complete_many(texts, max_tokens=20, temperature=0, ignore_eos=True)
        assert [one.usage.completion_tokens for one in done] == [20] * 4


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kv_ladder": "f16,q8_0"}, "there is none"),
        ({"kv_budget": THIRD, "cache_type_k": "q8_0"}, "named as well"),
        ({"kv_budget": THIRD, "kv_tail": 64, "kv_ladder": "q8_0,q4_0"}, "begins with q8_0"),
        ({"kv_budget": THIRD // 3, "kv_tail": 64}, "a tail and a sink keep in f16"),
        ({"kv_budget": THIRD, "n_cache_tokens": 512}, "how large the cache is"),
        ({"kv_budget": THIRD // 4, "n_ctx": 2048}, "holds 256 tokens in q4_1c128/kv3_0"),
        ({"kv_budget": 0}, "kv_budget is 0"),
        ({"kv_budget": 1000}, "no room for a page"),
    ],
)
def test_what_does_not_go_with_a_budget_is_refused(arguments, says):
    with pytest.raises(LocalKVError, match=says):
        LLM(MODEL, device="cpu", **arguments)


def test_a_tail_and_a_sink_stay_f16_as_the_plan_says():
    with LLM(MODEL, device="cpu", kv_budget=2 * THIRD, kv_tail=64, kv_sink=4) as llm:
        assert llm.memory.cache_k + llm.memory.cache_v <= 2 * THIRD
        assert llm.engine.n_batch < 256
        ids = ids_of(llm, 1500)
        done = llm.complete(ids, temperature=0, ignore_eos=True)
        assert done.usage.total_tokens == llm.cache.n_ctx
        ladder = llm.engine.cache.ladder
        pages = llm.engine.sequence.pages[0]
        rungs = [ladder.rungs[page] for page in pages]
        assert not rungs[0]
        assert not rungs[-1]
        assert max(rungs) > 0
        again = llm.complete([*ids[:700], *ids[:100]], max_tokens=4, temperature=0)
        assert again.usage.cached_tokens == 700


def test_context_ends_where_the_ladder_does():
    with LLM(MODEL, device="cpu", kv_budget=THIRD // 2, kv_ladder="q8_0,q4_0") as llm:
        assert llm.cache.n_ctx == 1024
        assert any("1024 tokens" in line for line in llm.warnings)


def test_an_audit_takes_what_was_predicted_as_pages_changed(llm):
    ids = ids_of(llm, 1200)
    done = llm.complete(ids, max_tokens=40, temperature=0, ignore_eos=True, audit=True)
    assert done.audit is not None
    assert done.audit.n_tokens == 40
    assert 0 < done.audit.kld_mean <= done.audit.kld_mean_most
    assert "q4_1c/q4_0" in done.audit.types


def test_an_audit_that_would_fill_the_cache_again_is_refused(llm):
    with pytest.raises(UsageError, match="changes the types of its pages"):
        llm.complete(STORY, max_tokens=2, audit="exact")
    stream = llm.stream(STORY, max_tokens=2)
    assert "".join(stream)
    with pytest.raises(UsageError, match="changes the types of its pages"):
        llm.audit(stream)
