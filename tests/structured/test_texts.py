"""Whole texts that keep to a grammar: alone, beside others, guessed at, after losing their rows."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator

import pytest

from localkv import LLM
from localkv.engine.speculation.speculator import Pace
from localkv.errors import LocalKVError, UsageError
from localkv.structured.grammar import Grammar
from support.paths import ROOT

PATH = ROOT / "models/tales-4M-Q8_0.gguf"
SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["fox", "owl"]}, "said": {"type": "string", "maxLength": 30}},
    "required": ["who", "said"],
    "additionalProperties": False,
}
PROMPTS = ["Once upon a time", "The fox", "Once upon", "In the evening there was"]


LONG = {"grammar": 'root ::= "a" [b-z ]{230}'}


@pytest.fixture(scope="module")
def many() -> Iterator[LLM]:
    with LLM(PATH, n_ctx=320, n_parallel=4, n_cache_tokens=512, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM(PATH, n_ctx=512, progress=False) as llm:
        yield llm


def test_many_texts_keep_each_to_its_own(many: LLM, alone: LLM) -> None:
    """Each text is what it is alone, guessed at or not, though some lose their rows meanwhile."""
    kinds = [{"schema": SCHEMA}, LONG, {}, LONG]
    options = [{**kind, "seed": i, "max_tokens": 250} for i, kind in enumerate(kinds)]
    pairs = list(zip(PROMPTS, options, strict=True))
    streams = [many.stream(prompt, **one) for prompt, one in pairs]
    texts = [""] * len(streams)
    while any(pieces := [next(stream, "") for stream in streams]):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert many.batch.stats.n_preempted
    for (prompt, one), stream, text in zip(pairs, streams, texts, strict=True):
        assert stream.completion.text == text
        assert stream.completion.finish_reason == "stop"
        assert alone.complete(prompt, **one).text == text
    assert json.loads(texts[0])["who"] in ("fox", "owl")
    assert len(texts[1]) == len(texts[3]) == 231


def test_guesses_change_nothing(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that repeats itself, of which the grammar ends some guesses."""
    monkeypatch.setattr(Pace, "worth", lambda self, confidence, most, **_: min(most, 7))
    item = {**SCHEMA, "properties": {"who": {"enum": ["fox", "owl"]}}, "required": ["who"]}
    schema = {"type": "array", "items": item, "minItems": 8, "maxItems": 8}
    for temperature in (0.0, 1.2):
        options = {"schema": schema, "seed": 1, "temperature": temperature, "max_tokens": 300}
        plain = alone.complete(PROMPTS[0], **options)
        guessed = alone.complete(PROMPTS[0], spec="ngram", **options)
        assert guessed.text == plain.text
        assert guessed.usage.accepted_tokens > 0
        assert plain.finish_reason == "stop" or plain.usage.completion_tokens == 300


def test_a_text_that_breaks_off_says_so(alone: LLM) -> None:
    done = alone.complete(PROMPTS[0], schema=SCHEMA, max_tokens=6)
    assert (done.finish_reason, done.context_full) == ("length", False)
    done = alone.complete([5] * 500, schema=SCHEMA)
    assert (done.finish_reason, done.context_full) == ("length", True)
    # the last token that it may have is the one that the grammar ends with
    for llm_call in (alone.complete, lambda *a, **k: alone.complete_many([a[0]], **k)[0]):
        done = llm_call(PROMPTS[0], grammar='root ::= "a"', max_tokens=1)
        assert (done.text, done.finish_reason, done.usage.completion_tokens) == ("a", "stop", 1)


def test_every_call_takes_a_grammar(alone: LLM) -> None:
    grammar = Grammar.regex("(fox|owl)!")
    said = [{"role": "user", "content": "Who?"}]

    async def later() -> str:
        return "".join([piece async for piece in alone.astream("Who?", grammar=grammar)])

    texts = [
        alone.complete("Who?", grammar=grammar, ignore_eos=True).text,
        alone.complete("Who?", grammar=grammar, logprobs=1, temperature=0).text,
        alone.chat(said, grammar=grammar).completion.text,
        asyncio.run(later()),
        *(one.text for one in alone.complete_many(["Who?", "And?"], grammar=grammar)),
    ]
    assert set(texts) <= {"fox!", "owl!"}


def test_what_is_refused_costs_no_token(alone: LLM) -> None:
    for options in ({"schema": {"not": {}}}, {"grammar": "root ::= x"}, {"grammar": "start: x"}):
        for call in (alone.complete, alone.stream):
            with pytest.raises(UsageError):
                call(PROMPTS[0], **options)
    with pytest.raises(LocalKVError, match="allows no token"):
        alone.complete(
            "a", grammar='root ::= "\u263a"', logit_bias=dict.fromkeys(range(1023), -math.inf)
        )
