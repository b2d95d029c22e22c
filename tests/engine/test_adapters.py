"""Texts with adapters beside others: bits, rows that are reused, states, audits, guesses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from localkv.errors import UsageError
from localkv.llm import LLM
from support.adapters import write_adapter

PROMPT = "Once upon a time there was a small fox who lived near the river."
LORAS: list[dict[int, float] | None] = [None, {}, {0: 1.0}, {0: -0.5}, {1: 1.0}, {0: 1.0, 1: 0.5}]
GREEDY = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("adapters")
    first = write_adapter(folder / "a.gguf", tiny_model)
    second = write_adapter(folder / "b.gguf", tiny_model, rank=3, seed=2, embedding=True)
    return {str(first): 0.25, str(second): 0.0}


@pytest.fixture(scope="module")
def alone(tiny_model: Path, adapters: dict[str, float]) -> Iterator[LLM]:
    with LLM(tiny_model, lora=adapters, n_ctx=256, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def texts(alone: LLM) -> list[tuple[str, list[float]]]:
    """Each text, and how probable its tokens are, with each of `LORAS`."""
    return [told(alone.complete(PROMPT, lora=lora, logprobs=0, **GREEDY)) for lora in LORAS]


def told(completion) -> tuple[str, list[float]]:
    assert completion.logprobs is not None
    return completion.text, [token.logprob for token in completion.logprobs]


def test_scales_change_the_text(texts: list[tuple[str, list[float]]]) -> None:
    assert len({text for text, _ in texts}) == len(LORAS)


def test_texts_of_a_batch_are_those_alone(
    tiny_model: Path, adapters: dict[str, float], texts: list[tuple[str, list[float]]]
) -> None:
    with LLM(
        tiny_model, lora=adapters, n_ctx=256, n_parallel=2 * len(LORAS), n_batch=64, progress=False
    ) as llm:
        for _ in range(2):  # the second time from rows that are there
            streams = [
                llm.stream(PROMPT, lora=lora, logprobs=0, **GREEDY) for lora in reversed(LORAS)
            ]
            found = []
            for stream in streams:
                "".join(stream)
                found.append(told(stream.completion))
            assert found[::-1] == texts
        reused = [stream.stats.n_reused for stream in streams]
        assert all(reused)


def test_without_an_adapter_bits_are_the_models(
    tiny_model: Path, alone: LLM, texts: list[tuple[str, list[float]]]
) -> None:
    with LLM(tiny_model, n_ctx=256, progress=False) as plain:
        assert told(plain.complete(PROMPT, logprobs=0, **GREEDY)) == texts[1]
    ids = alone.tokenizer.encode(PROMPT)
    with LLM(tiny_model, n_ctx=256, progress=False) as plain:
        assert not np.array_equal(plain.logits(ids), alone.logits(ids))


@pytest.mark.parametrize("size", [1, 3, 64])
def test_chunks_change_no_bit(
    size: int, tiny_model: Path, alone: LLM, adapters: dict[str, float]
) -> None:
    ids = alone.tokenizer.encode(PROMPT)
    with LLM(tiny_model, lora=adapters, n_ctx=256, n_batch=size, progress=False) as llm:
        assert np.array_equal(llm.logits(ids), alone.logits(ids))


def test_a_text_shares_no_rows_with_other_scales(
    tiny_model: Path, adapters: dict[str, float]
) -> None:
    with LLM(tiny_model, lora=adapters, n_ctx=256, n_parallel=6, progress=False) as llm:
        ids = llm.tokenizer.encode(PROMPT)
        for lora in ({0: 0.125}, {0: 0.5}, {}, None):
            stream = llm.stream(ids, lora=lora, **GREEDY)
            "".join(stream)
            assert stream.stats.n_reused == 0
        for lora in ({0: 0.5}, {0: 0.25}):  # the second one is what others have by default
            again = llm.stream(ids, lora=lora, **GREEDY)
            "".join(again)
            assert again.stats.n_reused == len(ids) - 1


def test_texts_in_turn(alone: LLM, texts: list[tuple[str, list[float]]]) -> None:
    """Streams that take the only slot from each other, token by token."""
    streams = [alone.stream(PROMPT, lora=lora, logprobs=0, **GREEDY) for lora in LORAS[:4]]
    going = list(streams)
    while going:
        going = [stream for stream in going if next(stream, None) is not None]
    assert [told(stream.completion) for stream in streams] == texts[:4]


def test_guesses_change_nothing(
    tiny_model: Path, adapters: dict[str, float], texts: list[tuple[str, list[float]]]
) -> None:
    with LLM(tiny_model, lora=adapters, n_ctx=256, spec="ngram", progress=False) as llm:
        for lora, want in zip(LORAS, texts, strict=True):
            assert told(llm.complete(PROMPT, lora=lora, logprobs=0, **GREEDY)) == want


def test_an_audit_reads_with_the_same_adapters(alone: LLM) -> None:
    for audit in (True, "exact"):
        found = alone.complete(PROMPT, lora={0: 1.0}, audit=audit, **GREEDY).audit
        assert found is not None
        assert found.kld_max_most < 1e-4


def test_states_know_adapters(
    tmp_path: Path, tiny_model: Path, adapters: dict[str, float], alone: LLM
) -> None:
    path, ids = tmp_path / "text.state", alone.tokenizer.encode(PROMPT)
    first = next(iter(adapters))
    alone.complete(ids, **GREEDY)
    alone.save_state(path, ids)
    cases = {"more": ({first: 0.5}, False), "none": (None, False), "same": ({first: 0.25}, True)}
    for lora, is_same in cases.values():
        with LLM(tiny_model, lora=lora, n_ctx=256, progress=False) as llm:
            if not is_same:
                with pytest.raises(UsageError, match="other LoRA adapters"):
                    llm.load_state(path)
                continue
            llm.load_state(path)
            stream = llm.stream(ids, **GREEDY)
            "".join(stream)
            assert stream.stats.n_reused == len(ids) - 1


def test_texts_on_a_disk_know_adapters(
    tmp_path: Path, tiny_model: Path, adapters: dict[str, float]
) -> None:
    options = {"n_ctx": 256, "n_parallel": 4, "cache_disk": tmp_path, "progress": False}
    text = PROMPT + " The fox said hello to the owl, and the owl said hello to the fox."

    def reused(llm: LLM, lora: dict[int, float] | None) -> int:
        stream = llm.stream(text, lora=lora, **GREEDY)
        "".join(stream)
        return stream.stats.n_reused

    with LLM(tiny_model, lora=adapters, **options) as llm:
        assert [reused(llm, lora) for lora in (None, {0: 0.5})] == [0, 0]
        n_prompt = len(llm.tokenizer.encode(text))
    with LLM(tiny_model, **options) as llm:
        assert reused(llm, None) == 0
    with LLM(tiny_model, lora=adapters, **options) as llm:
        assert reused(llm, {0: 0.75}) == 0
        assert reused(llm, {0: 0.5}) == reused(llm, None) == n_prompt - 1


def test_embeddings_are_adapted(tiny_model: Path, alone: LLM) -> None:
    with LLM(tiny_model, n_ctx=256, progress=False) as plain:
        assert not np.array_equal(plain.embed(PROMPT), alone.embed(PROMPT))
