"""Reasoning that ends after a number of tokens: by the tag that ends it, put in place of a draw."""

from __future__ import annotations

import pytest

from localkv.engine.reasoning import ReasoningBudget
from localkv.loader.answer_tags import REASONING_TAGS, ReasoningTags
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from support.tiny_vocabulary import bpe_metadata, spm_metadata, spm_model

THINK = ReasoningTags("<think>", "</think>")
ASKED = ChatPrompt([1], "")
OPENED = ChatPrompt([1], "<think>\n", reasoning=THINK)


def in_one_token() -> Tokenizer:
    tags = [tag for pair in REASONING_TAGS for tag in pair]
    return tokenizer_from_metadata(bpe_metadata("llama-bpe", control=tags))


def in_many_tokens() -> Tokenizer:
    return tokenizer_from_metadata(spm_metadata(spm_model()))


TOKENIZERS = {"one token": in_one_token(), "many tokens": in_many_tokens()}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Its tags are one token each, or many."""
    return TOKENIZERS[request.param]


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_segments([(text, True)], add_special=False)


def written(
    tokenizer: Tokenizer, most: int, prompt: ChatPrompt, text: str
) -> tuple[list[int], int]:
    """The ids of an answer that would be `text` without a budget, and its tokens of reasoning."""
    budget = ReasoningBudget(most, prompt, tokenizer)
    drawn = iter(ids_of(tokenizer, text))
    ids: list[int] = []
    while True:
        token = budget.forced()
        if token is None:
            token = next(drawn, None)
        if token is None:
            return ids, budget.n_tokens
        budget.accept(token)
        ids.append(token)


@pytest.mark.parametrize("most", [0, 1, 3, 7])
def test_it_ends_after_so_many_tokens(tokenizer: Tokenizer, most: int) -> None:
    thought = "The cat sat on the mat. The dog sat on the log."
    n_open = len(ids_of(tokenizer, "<think>"))
    for prompt, text, begin in ((OPENED, thought, 0), (ASKED, f"<think>{thought}", n_open)):
        drawn = ids_of(tokenizer, text)
        close = ids_of(tokenizer, "</think>")
        ids, n_tokens = written(tokenizer, most, prompt, text)
        assert ids == [*drawn[: begin + most], *close, *drawn[begin + most :]]
        assert n_tokens == most


@pytest.mark.parametrize("most", [20, 1000])
def test_reasoning_that_ends_by_itself_is_left_alone(tokenizer: Tokenizer, most: int) -> None:
    text = "<think>The cat</think>" + "The dog sat on the log. " * 30
    ids, n_tokens = written(tokenizer, most, ASKED, text)
    assert ids == ids_of(tokenizer, text)
    assert n_tokens < 20


@pytest.mark.parametrize(
    "text", ["The cat <think>", " \n <thin cat <think>", "<thanks> <think> cat", "<", ""]
)
def test_a_tag_further_on_is_text(tokenizer: Tokenizer, text: str) -> None:
    assert written(tokenizer, 0, ASKED, text) == (ids_of(tokenizer, text), 0)


def test_white_space_may_come_first(tokenizer: Tokenizer) -> None:
    ids, n_tokens = written(tokenizer, 1, ASKED, "\n <think>the the the")
    assert tokenizer.decode(ids).count("</think>") == 1
    assert n_tokens == 1


@pytest.mark.parametrize("tags", REASONING_TAGS)
def test_every_familys_tags(tags: ReasoningTags) -> None:
    tokenizer = TOKENIZERS["one token"]
    ids, _ = written(tokenizer, 2, ASKED, f"{tags.open}the the the the")
    assert ids[3] == tokenizer.token_to_id(tags.close)
    opened = ChatPrompt([1], tags.open, reasoning=tags)
    assert written(tokenizer, 0, opened, "the")[0][0] == tokenizer.token_to_id(tags.close)


def test_an_answer_that_goes_on_has_the_rest(tokenizer: Tokenizer) -> None:
    text = "the the the the the"
    close = ids_of(tokenizer, "</think>")
    begun = ChatPrompt([1], "", is_begun=True, reasoning=THINK, n_reasoned=3)
    ids, n_tokens = written(tokenizer, 5, begun, text)
    assert (ids[2 : 2 + len(close)], n_tokens) == (close, 5)
    over = ChatPrompt([1], "", is_begun=True)
    assert written(tokenizer, 0, over, f"<think>{text}")[0] == ids_of(tokenizer, f"<think>{text}")
