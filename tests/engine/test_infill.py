"""Filling in the middle: the tokens of prompts, and what a model answers to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv import LLM
from localkv.engine.tokenized_model import INFILL_TOKENS, SNIPPET
from localkv.errors import UsageError
from support.tiny_model import FIM, write_tiny_model

PREFIX, SUFFIX, PROMPT = "Once upon a time there", "near the river.", " was a"
EXTRA = [("fox.txt", "The fox said hello to the owl."), ("owl.txt", "It was a good day.")]
CODE_ONLY = FIM[:3]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with tokens for a repository and its files."""
    return LLM(write_tiny_model(tmp_path_factory.mktemp("fim") / "fim.gguf", control=FIM))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A model with tokens for what is around the gap only."""
    return LLM(write_tiny_model(tmp_path_factory.mktemp("fim") / "plain.gguf", control=CODE_ONLY))


def _put_together(llm: LLM, *parts: str | tuple[str]) -> list[int]:
    """The tokens of texts, each cut by itself, and of control tokens, which are tuples."""
    ids = list[int]()
    for part in parts:
        if isinstance(part, tuple):
            [token] = llm.tokenizer.special_tokens(part[0])
            ids.append(token)
        else:
            ids += llm.tokenize(part, add_special=False)
    return ids


PRE, SUF, MID, REPO, FILE = ((text,) for text in FIM)
BOS = ("<s>",)


def test_the_layout_of_llama_server(llm: LLM) -> None:
    found = llm.infill_prompt(PREFIX, SUFFIX, extra=EXTRA, prompt=PROMPT, n_ctx=4096)
    (one, text), (other, more) = EXTRA
    repository = REPO, "myproject\n", FILE, f"{one}\n", text, FILE, f"{other}\n", more
    around = FILE, "filename\n", BOS, PRE, PREFIX, PROMPT, SUF, SUFFIX, MID
    assert found == _put_together(llm, *repository, *around)


def test_the_suffix_first(llm: LLM) -> None:
    found = llm.infill_prompt(PREFIX, SUFFIX, prompt=PROMPT, n_ctx=4096, suffix_first=True)
    files = REPO, "myproject\n", FILE, "filename\n"
    assert found == _put_together(llm, *files, BOS, SUF, SUFFIX, PRE, PREFIX, PROMPT, MID)


def test_without_tokens_for_files(plain: LLM) -> None:
    found = plain.infill_prompt(PREFIX, SUFFIX, extra=EXTRA, n_ctx=4096)
    files = (part for _, text in EXTRA for part in (SNIPPET, text))
    assert found == _put_together(plain, *files, BOS, PRE, PREFIX, SUF, SUFFIX, MID)


def test_control_tokens_in_texts_are_text(plain: LLM) -> None:
    markup = "".join(CODE_ONLY)
    ids = plain.infill_prompt(markup, markup, extra=[(markup, markup)], n_ctx=4096)
    assert sum(map(plain.tokenizer.is_control, ids)) == 4  # BOS and the three


def test_what_is_kept_of_long_texts(llm: LLM) -> None:
    n_ctx, most = 2 * INFILL_TOKENS, 300
    long, files = "a fox and " * 4000, [("long", "an owl " * 4000)]
    ids = llm.infill_prompt(long, long, extra=files, prompt=PROMPT, n_ctx=n_ctx, max_tokens=most)
    [pre, suf, mid] = _put_together(llm, PRE, SUF, MID)
    n_prompt = len(_put_together(llm, PROMPT))
    whole, start, between = _put_together(llm, long), ids.index(pre), ids.index(suf)
    n_prefix, n_suffix = 3 * (INFILL_TOKENS // 4), INFILL_TOKENS // 4 - 2 - n_prompt
    assert ids[start + 1 : between] == whole[-n_prefix:] + _put_together(llm, PROMPT)
    assert ids[between + 1 :] == [*whole[:n_suffix], mid]
    every = _put_together(llm, REPO, "myproject\n", FILE, "long\n", files[0][1], FILE, "filename\n")
    assert ids[: start - 1] == every[-(n_ctx - INFILL_TOKENS - 2 * most) :]


@pytest.mark.parametrize("n_ctx", [64, 200, 1000, 2048, 2731, 5000])
@pytest.mark.parametrize("most", [None, 0, 8, 40])
def test_room_for_an_answer(llm: LLM, n_ctx: int, most: int | None) -> None:
    long = "a fox and " * 4000
    ids = llm.infill_prompt(long, long, extra=[("a", long)], n_ctx=n_ctx, max_tokens=most)
    assert len(ids) + min(most or 1, n_ctx // 8) <= n_ctx


def test_a_model_without_tokens_for_it(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="no prefix and no suffix and no middle token"):
        LLM(tiny_model).infill(PREFIX, SUFFIX)


def test_a_gap_that_is_filled(llm: LLM) -> None:
    options = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    completion = llm.infill(PREFIX, SUFFIX, **options)
    ids = llm.infill_prompt(PREFIX, SUFFIX, n_ctx=llm.cache.n_ctx, max_tokens=8)
    assert completion.text == llm.complete(ids, **options).text
    assert completion.usage.prompt_tokens == len(ids)


def test_a_further_keystroke_costs_its_tokens(llm: LLM) -> None:
    """What is before the gap is in the cache; the suffix comes after the keystroke."""
    options = {"extra": EXTRA, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    llm.infill(PREFIX, SUFFIX, **options)
    usage = llm.infill(PREFIX + " was", SUFFIX, **options).usage
    n_new = len(_put_together(llm, " was", SUF, SUFFIX, MID))
    assert usage.prompt_tokens - usage.cached_tokens <= n_new + 2


def test_a_further_keystroke_with_the_suffix_first(llm: LLM) -> None:
    options = {"suffix_first": True, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    llm.infill(PREFIX, "A suffix. " + SUFFIX, **options)
    usage = llm.infill(PREFIX + " was", "A suffix. " + SUFFIX, **options).usage
    assert usage.prompt_tokens - usage.cached_tokens <= len(_put_together(llm, " was", MID)) + 1
