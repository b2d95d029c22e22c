"""Options of the Python API: names that do not exist, and values of wrong types."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localkv import LLM, LocalKVError
from localkv.errors import UsageError
from localkv.llm import CHAT_OPTIONS, STREAM_OPTIONS
from localkv.option_checks import MEANT, UnknownOptionError, keywords, nearest_name


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, n_ctx=64)


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("q4_9", ("q4_1", "q4_0", "q8_0"), "q4_0"),  # 9 is beside 0
        ("q9_0", ("q4_0", "q5_0", "q8_0"), "q8_0"),
        ("Q8_0", ("q4_0", "q8_0"), "q8_0"),
        ("--foo", ("--tools", "--fit"), None),
        ("--tool", ("--tools", "--fit"), "--tools"),
        ("--type", ("--type-k-swa", "--type-v", "--type-k"), "--type-k"),
        ("-", ("-a",), None),
    ],
)
def test_nearest_name(name: str, known: tuple[str, ...], nearest: str | None) -> None:
    assert nearest_name(name, known) == nearest


def refusal(llm: LLM, **options: object) -> str:
    with pytest.raises(UnknownOptionError) as caught:
        llm.complete("x", **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temp", "temperature"),
        ("n", "max_tokens"),
        ("n_predict", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("top_n", "top_n_sigma"),
        ("stop_sequences", "stop"),
        ("repetition_penalty", "repeat_penalty"),
        ("temprature", "temperature"),
    ],
)
def test_the_option_that_was_meant(llm: LLM, name: str, meant: str) -> None:
    assert refusal(llm, **{name: 1}) == f"unknown option {name!r}: did you mean {meant}?"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("num_ctx", r"\(n_ctx is an option of LLM\(\.\.\.\)\)"),
        ("cache_type_k", r"\(cache_type_k is an option of LLM\(\.\.\.\)\)"),
        ("device_map", r"\(n_gpu_layers, n_cpu_moe and override_tensor say "),
        ("response_format", r"\(schema=\.\.\. keeps the text to a JSON schema"),
        ("zzz", r"\(options: max_tokens, stop, .*, samplers\)"),
    ],
)
def test_advice_where_no_option_of_the_call_was_meant(llm: LLM, name: str, words: str) -> None:
    with pytest.raises(UnknownOptionError, match=rf"^unknown option '{name}' {words}"):
        llm.stream("x", **{name: 1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_ctx", "unknown option 'num_ctx': did you mean n_ctx?"),
        ("n_thread", "unknown option 'n_thread': did you mean n_threads?"),
        ("type_k", "unknown option 'type_k': did you mean cache_type_k?"),
        ("temp", "unknown option 'temp' (temperature is an option of complete, stream and chat)"),
        ("seed", "unknown option 'seed' (seed is an option of complete, stream and chat)"),
    ],
)
def test_the_constructor_too(tmp_path: Path, name: str, message: str) -> None:
    """Before it looks at the file."""
    with pytest.raises(UnknownOptionError) as caught:
        LLM(tmp_path / "none.gguf", **{name: 1})
    assert str(caught.value) == message


def test_the_chat_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(UnknownOptionError, match=r"^unknown option 'tool': did you mean tools\?$"):
        llm.chat(messages, tool=[])
    with pytest.raises(UnknownOptionError, match=r"^unknown option 'temp': did you mean temper"):
        llm.chat(messages, temp=1)
    with pytest.raises(UnknownOptionError, match=r"'tools' \(tools is an option of chat\)$"):
        llm.stream("x", tools=[])


def test_what_can_catch_it() -> None:
    assert issubclass(UnknownOptionError, LocalKVError)
    assert issubclass(UnknownOptionError, UsageError)
    assert issubclass(UnknownOptionError, TypeError)


def test_names_of_other_libraries_are_none_of_ours(llm: LLM) -> None:
    """And each leads to an option that exists."""
    ours = {*STREAM_OPTIONS, *CHAT_OPTIONS, *keywords(LLM.__init__)}
    assert not ours & MEANT.keys()
    assert {*MEANT.values()} <= ours


ODD = (None, "zz", -7, 1.5, True, 2**70, float("nan"), b"x", [], {}, object(), [5], [None])
CALLS: dict[str, Callable[[LLM, object], object]] = {
    "complete": lambda llm, value: llm.complete(value, max_tokens=1),  # type: ignore[call-overload]
    "complete_many": lambda llm, value: llm.complete_many(value, max_tokens=1),  # type: ignore[arg-type]
    "stream": lambda llm, value: llm.stream(value, max_tokens=1).completion,  # type: ignore[arg-type]
    "chat": lambda llm, value: llm.chat(value, max_tokens=1).completion,  # type: ignore[arg-type]
    "tokenize": lambda llm, value: llm.tokenize(value),  # type: ignore[arg-type]
    "detokenize": lambda llm, value: llm.detokenize(value),  # type: ignore[arg-type]
    "logits": lambda llm, value: llm.logits(value),  # type: ignore[arg-type]
    "embed": lambda llm, value: llm.embed(value),  # type: ignore[call-overload]
    "save_state": lambda llm, value: llm.save_state("/nowhere/state", value),  # type: ignore[arg-type]
    "load_state": lambda llm, value: llm.load_state(value),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value).partition(" at 0x")[0])
def test_a_value_of_a_wrong_type_is_refused_in_words(
    llm: LLM, tiny_model: Path, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other error than `LocalKVError` fails the test."""
    monkeypatch.chdir(tmp_path)  # a name may become a folder
    for call in CALLS.values():
        with suppress(LocalKVError):
            call(llm, value)
    for name in STREAM_OPTIONS:
        with suppress(LocalKVError):
            llm.stream("Once", **{name: value}).close()  # type: ignore[arg-type]
    for name in CHAT_OPTIONS:
        with suppress(LocalKVError):
            llm.chat("Once", **{name: value}).close()  # type: ignore[arg-type]
    for name in {*keywords(LLM.__init__)} - {"device", "cpu_strict"}:  # of the whole process
        with suppress(LocalKVError):
            LLM(tiny_model, **{"n_ctx": 64, name: value}).close()  # type: ignore[arg-type]
    with suppress(LocalKVError):
        LLM(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens must be a whole number or None, not '5'"),
        ({"stop": None}, "stop must be text or a list of texts, not None"),
        ({"stop": ["a", 5]}, r"stop must be text or a list of texts, not \['a', 5\]"),
        ({"stop": list}, "stop must be text or a list of texts, not <class 'list'>"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
        ({"logit_bias": [[1, 2]]}, "logit_bias must be a dict, not"),
        ({"samplers": "top_k"}, "samplers must be a list of names, not 'top_k'"),
        ({"cancel": 5}, "cancel must be a threading.Event or None, not 5"),
    ],
)
def test_the_message_says_what_an_option_may_be(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        llm.complete("Once", **options)


def test_numbers_and_arrays_of_numpy_are_taken(llm: LLM) -> None:
    ids = np.array(llm.tokenize("Once"))
    text = llm.complete(ids, max_tokens=np.int64(3), temperature=np.float32(0)).text  # type: ignore[call-overload]
    assert text == llm.complete("Once", max_tokens=3, temperature=0).text


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loaded_model_is_not_copied(llm: LLM, copied: Callable[[object], object]) -> None:
    with pytest.raises(UsageError, match="a loaded model can't be copied or pickled"):
        copied(llm)
