"""Logprobs: of what distribution they are, of which tokens, and how they are printed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from localkv import LLM
from localkv.engine.logprobs import LEAST, RankedToken, as_openai, named, ranked
from localkv.errors import UsageError
from support.tiny_model import write_tiny_model

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(write_tiny_model(tmp_path_factory.mktemp("logprobs") / "tiny.gguf"), n_ctx=128)


def log_softmax(logits: object) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("n", [0, 1, 5, 300])
def test_a_token_among_all(n: int) -> None:
    logits = np.random.default_rng(1).normal(0, 4, 300).astype(np.float32)
    logits[7] = logits[11] = logits.max() + 1  # of equal ones the lower id comes first
    logits[20] = -np.inf
    exact = log_softmax(logits)
    one = ranked(logits, 42, n)
    assert one.token == 42
    assert one.logprob == pytest.approx(exact[42], abs=1e-6)
    order = np.argsort(-exact, kind="stable")[:n]
    assert [token for token, _ in one.top] == list(order)
    assert [logprob for _, logprob in one.top] == pytest.approx(list(exact[order]), abs=1e-6)
    assert isinstance(one.logprob, float)
    json.dumps(as_openai((named(one, lambda token: b"%d" % token),)), allow_nan=False)


def test_they_are_the_models_own(llm: LLM) -> None:
    """Before samplers, biases and temperature."""
    stream = llm.stream(
        PROMPT,
        max_tokens=12,
        logprobs=3,
        seed=5,
        temperature=2.0,
        repeat_penalty=1.5,
        logit_bias={3: 5.0},
        ignore_eos=True,
    )
    completion = stream.completion
    assert completion.logprobs == stream.token_logprobs
    assert completion.logprobs is not None
    assert len(completion.logprobs) == completion.usage.completion_tokens == 12
    ids = llm.tokenize(PROMPT)
    n_prompt = len(ids)
    ids += [one.id for one in completion.logprobs]
    exact = log_softmax(llm.logits(ids))
    for at, one in enumerate(completion.logprobs):
        row = exact[n_prompt + at - 1]
        assert one.logprob == pytest.approx(row[one.id], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:3]
        assert [other.id for other in one.top_logprobs] == list(best)
        assert [other.logprob for other in one.top_logprobs] == pytest.approx(
            list(row[best]), abs=1e-4
        )


def test_they_change_no_text(llm: LLM) -> None:
    plain = llm.complete(PROMPT, max_tokens=20, seed=5)
    asked = llm.complete(PROMPT, max_tokens=20, seed=5, logprobs=0)
    assert (asked.text, plain.logprobs) == (plain.text, None)
    assert asked.logprobs is not None
    assert all(one.top_logprobs == () for one in asked.logprobs)
    joined = b"".join(one.bytes for one in asked.logprobs)
    assert joined.decode(errors="replace").lstrip() == plain.text.lstrip()


def test_a_stream_yields_them_as_it_goes(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=10, seed=1, logprobs=1)
    assert stream.token_logprobs == ()
    counts = []
    for _ in stream:
        assert stream.token_logprobs is not None
        counts.append(len(stream.token_logprobs))
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == stream.stats.n_generated
    assert llm.stream(PROMPT).token_logprobs is None


def test_those_that_are_taken_are_kept_no_longer(llm: LLM) -> None:
    whole = llm.complete(PROMPT, max_tokens=10, seed=1, logprobs=1).logprobs
    stream = llm.stream(PROMPT, max_tokens=10, seed=1, logprobs=1)
    taken = [one for _ in stream for one in stream.take_logprobs()]
    assert (tuple(taken), stream.completion.logprobs) == (whole, ())
    assert not stream.generation._ranked
    assert llm.stream(PROMPT).take_logprobs() == ()


def test_parts_of_characters_are_bytes(llm: LLM) -> None:
    """Tokens of a byte each, which are drawn by force."""
    ids = [llm.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert None not in ids
    got = [
        llm.complete(PROMPT, max_tokens=1, logit_bias={token: 1000.0}, logprobs=0).logprobs
        for token in ids
    ]
    assert [one.bytes for (one,) in got] == [b"\xe2", b"\x82", b"\xac"]
    assert [one.token for (one,) in got] == ["\ufffd"] * 3
    (entry,) = as_openai(got[0])["content"]
    assert entry["bytes"] == [0xE2]
    assert entry["id"] == ids[0]


def test_the_token_that_ends_a_text_is_none_of_it(llm: LLM) -> None:
    assert llm.tokenizer.eos_id is not None
    only_eos = {llm.tokenizer.eos_id: 1000.0}
    assert llm.complete(PROMPT, logit_bias=only_eos, logprobs=2).logprobs == ()


@pytest.mark.parametrize(
    ("n", "wanted"),
    [
        *((n, r"from 0 to \d+, the vocabulary, not") for n in (-1, 10**6)),
        *((n, "or None, not") for n in (True, 1.5, "3")),
    ],
)
def test_numbers_that_there_can_not_be(llm: LLM, n: object, wanted: str) -> None:
    with pytest.raises(UsageError, match=f"^logprobs must be a whole number {wanted} {n!r}"):
        llm.stream(PROMPT, logprobs=n)
    assert llm.complete(PROMPT, max_tokens=0, logprobs=llm.config.n_vocab).logprobs == ()


def test_openai_s_shape() -> None:
    one = RankedToken(3, -0.5, ((4, -0.25), (5, -math.inf)))
    texts = {3: b"a", 4: " ü".encode(), 5: b"\xc3"}
    assert as_openai((named(one, texts.__getitem__),)) == {
        "content": [
            {
                "id": 3,
                "token": "a",
                "bytes": [97],
                "logprob": -0.5,
                "top_logprobs": [
                    {"id": 4, "token": " ü", "bytes": [32, 195, 188], "logprob": -0.25},
                    {"id": 5, "token": "\ufffd", "bytes": [195], "logprob": LEAST},
                ],
            }
        ]
    }
