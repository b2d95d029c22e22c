"""`LLM.close` and `with LLM(...)`: what is freed, and what is refused afterwards."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from localkv import LLM, LocalKVError
from localkv.errors import ModelClosedError

CALLS: list[Callable[[LLM], object]] = [
    lambda llm: llm.complete("x"),
    lambda llm: llm.chat([{"role": "user", "content": "x"}]),
    lambda llm: llm.tokenize("x"),
    lambda llm: llm.detokenize([1]),
    lambda llm: llm.logits([1, 2]),
    lambda llm: llm.engine,
]


def test_the_end_of_the_block_closes_it(tiny_model: Path) -> None:
    with LLM(tiny_model, n_ctx=64) as llm:
        assert llm.complete("The fox", max_tokens=2).text
    for call in CALLS:
        with pytest.raises(ModelClosedError) as caught:
            call(llm)
        assert str(caught.value) == "the model is closed (load it again with LLM(...))"
    assert isinstance(caught.value, LocalKVError)
    assert llm.config.n_vocab
    assert llm.memory.total
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nonsense'"):
        _ = llm.nonsense


def test_an_error_in_the_block_closes_it(tiny_model: Path) -> None:
    with pytest.raises(ZeroDivisionError), LLM(tiny_model, n_ctx=64) as llm:
        _ = 1 / 0
    with pytest.raises(ModelClosedError):
        llm.tokenize("x")


def test_it_frees_the_mapping_and_the_cache_at_once(tiny_model: Path) -> None:
    """Even those that a stream which nobody reads on used."""
    llm = LLM(tiny_model, n_ctx=64)
    stream = llm.stream("The fox", max_tokens=20)
    next(stream)
    (file,) = llm.gguf._files
    held = [weakref.ref(thing) for thing in (file.data, llm.engine.cache, llm.engine.model)]
    del file
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            llm.close()
        assert [thing() for thing in held] == [None, None, None]
    finally:
        gc.enable()
    with pytest.raises(ModelClosedError):
        next(stream)
    assert stream.completion.finish_reason == "cancelled"


def test_it_is_closed_once(tiny_model: Path) -> None:
    llm = LLM(tiny_model, n_ctx=64)
    llm.close()
    llm.close()
    with llm:
        pass


def test_it_waits_for_the_turn_of_another_thread(tiny_model: Path) -> None:
    llm = LLM(tiny_model, n_ctx=200)
    stream = llm.stream("The fox", ignore_eos=True)
    next(stream)
    errors = list[Exception]()

    def read() -> None:
        try:
            for _ in stream:
                pass
        except LocalKVError as error:
            errors.append(error)

    reader = Thread(target=read)
    reader.start()
    llm.close()
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert [type(error) for error in errors] in ([ModelClosedError], [])  # [] if it had ended


def test_other_models_go_on(tiny_model: Path) -> None:
    other = LLM(tiny_model, n_ctx=64)
    text = other.complete("The fox", max_tokens=4, temperature=0).text
    LLM(tiny_model, n_ctx=64).close()
    assert other.complete("The fox", max_tokens=4, temperature=0).text == text
