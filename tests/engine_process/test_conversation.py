"""Engines that answer conversations: in this process, and in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localkv.chat.engine import (
    LOAD_STAGES,
    ChatEngine,
    ChatRequest,
    EngineOptions,
    EngineStoppedError,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.engine_process.client import EngineProcess
from localkv.engine_process.conversation import LocalEngine
from localkv.errors import ContextOverflowError, LocalKVError
from localkv.sampling.params import SamplingParams
from support import tiny_model as tiny
from support.program import clean_env
from support.waiting import runs, wait_for

HELLO = ({"role": "user", "content": "Tell me of the fox"},)
GREEDY = SamplingParams(temperature=0.0)
ARGUMENTS = {"n_ctx": 4096, "cache_type_k": "q8_0", "cache_type_v": "q4_0", "n_threads": 1}

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def loaded(engine: ChatEngine) -> ChatEngine:
    engine.load(lambda progress: None)
    return engine


@pytest.fixture(scope="module")
def engines(tiny_model: Path) -> Iterator[dict[str, ChatEngine]]:
    """One of each kind, which answer alike."""
    options = EngineOptions(str(tiny_model), ARGUMENTS)
    both = {"local": loaded(LocalEngine(options)), "process": loaded(EngineProcess(options))}
    yield both
    for engine in both.values():
        engine.close()


@pytest.fixture(params=["local", "process"])
def engine(request: pytest.FixtureRequest, engines: dict[str, ChatEngine]) -> ChatEngine:
    return engines[request.param]


def said(engine: ChatEngine, request: ChatRequest) -> tuple[str, Finished]:
    *deltas, finished = engine.answer(request)
    assert isinstance(finished, Finished)
    assert sum(len(delta.seconds) for delta in deltas) <= finished.completion_tokens
    return "".join(delta.text for delta in deltas), finished


def test_both_say_what_llm_says(engine: ChatEngine, tiny_model: Path) -> None:
    from localkv.llm import LLM

    request = ChatRequest(HELLO, GREEDY, max_tokens=24)
    text, finished = said(engine, request)
    expected = LLM(tiny_model, **ARGUMENTS).chat(HELLO, max_tokens=24, params=GREEDY).completion
    assert text == expected.text
    assert finished.completion_tokens == expected.usage.completion_tokens
    assert finished.prompt_tokens == engine.count_tokens(ChatRequest(HELLO))


def test_the_next_turn_reuses_the_cache(engine: ChatEngine) -> None:
    said(engine, ChatRequest(HELLO, GREEDY, max_tokens=8))
    _, finished = said(engine, ChatRequest(HELLO, GREEDY, max_tokens=8))
    assert finished.cached_tokens == finished.prompt_tokens - 1


def test_deltas_are_few_and_complete(engine: ChatEngine) -> None:
    started = time.monotonic()
    request = ChatRequest(HELLO, SamplingParams(seed=1), max_tokens=200, ignore_eos=True)
    *deltas, finished = engine.answer(request)
    assert len(deltas) <= 20 * (time.monotonic() - started) + 2
    assert [d.n_tokens for d in deltas] == sorted(d.n_tokens for d in deltas)
    assert finished.total_tokens >= deltas[-1].n_tokens


def test_a_long_prompt_is_read_in_pieces_that_are_told(tiny_model: Path) -> None:
    from localkv.llm import LLM

    arguments = {**ARGUMENTS, "n_batch": 16}
    messages = ({"role": "user", "content": "Tell me of the fox. " * 40},)
    engine = loaded(LocalEngine(EngineOptions(str(tiny_model), arguments)))
    began = time.perf_counter()
    news, first = [], 0.0
    for one in engine.answer(ChatRequest(messages, GREEDY, max_tokens=8)):
        if isinstance(one, TextDelta) and not first:
            first = time.perf_counter() - began
        if isinstance(one, PromptProgress):
            time.sleep(0.02)  # nobody works on it meanwhile
        news.append(one)
    read = [one for one in news if isinstance(one, PromptProgress)]
    finished = news[-1]
    assert read[0] == PromptProgress(0, finished.prompt_tokens)
    assert [one.n_read for one in read] == sorted({one.n_read for one in read})
    assert read[-1].n_read < finished.prompt_tokens
    assert news[: len(read)] == read
    expected = LLM(tiny_model, **arguments).chat(messages, max_tokens=8, params=GREEDY).completion
    assert "".join(one.text for one in news if isinstance(one, TextDelta)) == expected.text
    assert 0.3 * first < finished.prompt_seconds < first


def test_cancelling_keeps_the_engine(engine: ChatEngine) -> None:
    request = ChatRequest(HELLO, SamplingParams(seed=1), ignore_eos=True)
    answer = engine.answer(request)
    first = next(answer)
    engine.cancel()
    *_, finished = answer
    assert isinstance(first, TextDelta)
    assert finished.finish_reason == "cancelled"
    assert finished.total_tokens < 4096
    assert said(engine, ChatRequest(HELLO, GREEDY, max_tokens=3))[1].completion_tokens <= 3


def test_an_answer_that_is_left_does_not_disturb_the_next(engine: ChatEngine) -> None:
    answer = engine.answer(ChatRequest(HELLO, SamplingParams(seed=1), ignore_eos=True))
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    request = ChatRequest(HELLO, GREEDY, max_tokens=5)
    assert said(engine, request)[0] == said(engine, request)[0]


def test_an_overfull_context_is_refused_and_survived(engine: ChatEngine) -> None:
    long = ({"role": "user", "content": "fox " * 5000},)
    with pytest.raises(ContextOverflowError, match="but the context holds 4096"):
        list(engine.answer(ChatRequest(long)))
    assert said(engine, ChatRequest(HELLO, GREEDY, max_tokens=1))[1].completion_tokens == 1


def test_loading_tells_its_stages(tiny_model: Path) -> None:
    news: list[LoadProgress] = []
    engine = LocalEngine(EngineOptions(str(tiny_model), ARGUMENTS))
    facts = engine.load(news.append)
    assert list(dict.fromkeys(progress.stage for progress in news)) == list(LOAD_STAGES)
    weights = [p for p in news if p.stage == "weights"]
    assert [p.done for p in weights] == list(range(weights[0].total + 1))
    assert (facts.type_k, facts.type_v, facts.n_ctx) == ("q8_0", "q4_0", 4096)
    engine.close()
    with pytest.raises(EngineStoppedError):
        list(engine.answer(ChatRequest(HELLO)))


@pytest.mark.parametrize("kind", [LocalEngine, EngineProcess])
def test_errors_of_loading_keep_their_hints(kind: type, tmp_path: Path) -> None:
    path = tiny.write_tiny_model(tmp_path / "m.gguf", template=False)
    engine = kind(EngineOptions(str(path)))
    with pytest.raises(LocalKVError, match="has no chat template") as raised:
        engine.load(lambda progress: None)
    assert "--chat-template-file" in (raised.value.hint or "")
    engine.close()
    given = kind(EngineOptions(str(path), {}, "{{ messages[-1].content }}"))
    loaded(given)
    assert given.count_tokens(ChatRequest(HELLO)) > 0
    given.close()


def test_a_file_that_is_missing_is_found_out_without_torch(tmp_path: Path) -> None:
    engine = EngineProcess(EngineOptions(str(tmp_path / "none.gguf")))
    news: list[LoadProgress] = []
    with pytest.raises(LocalKVError, match="no such file"):
        engine.load(news.append)
    assert [progress.stage for progress in news] == ["header"]
    engine.close()


def test_a_killed_engine_is_an_error_and_not_a_hang(tiny_model: Path) -> None:
    engine = EngineProcess(EngineOptions(str(tiny_model), ARGUMENTS))
    loaded(engine)
    answer = engine.answer(ChatRequest(HELLO, SamplingParams(seed=1), ignore_eos=True))
    next(answer)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineStoppedError, match=r"the engine stopped \(SIGKILL\)"):
        list(answer)
    with pytest.raises(EngineStoppedError):
        engine.count_tokens(ChatRequest(HELLO))
    engine.cancel()  # harmless
    engine.close()


def child(program: str) -> EngineProcess:
    return EngineProcess(EngineOptions("m.gguf"), command=[sys.executable, "-c", program])


def test_the_last_words_of_a_child_are_told() -> None:
    engine = child("import sys; sys.stdin.buffer.read(4); sys.exit('out of luck')")
    with pytest.raises(EngineStoppedError) as raised:
        engine.load(lambda progress: None)
    assert raised.value.message == "the engine stopped (exit code 1)"
    assert raised.value.hint == "out of luck"
    engine.close()


def test_closing_ends_whoever_waits() -> None:
    engine = child("import sys, time; sys.stdin.buffer.read(4); time.sleep(60)")
    errors: list[LocalKVError] = []

    def load() -> None:
        try:
            engine.load(lambda progress: None)
        except LocalKVError as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    while engine.pid is None:
        time.sleep(0.01)
    engine.close()
    thread.join(20)
    assert [type(error) for error in errors] == [EngineStoppedError]


def test_a_child_does_not_outlive_its_parent(tiny_model: Path) -> None:
    program = f"""
import os
from localkv.chat.engine import *
from localkv.engine_process.client import EngineProcess
engine = EngineProcess(EngineOptions({str(tiny_model)!r}))
engine.load(lambda progress: None)
print(engine.pid, flush=True)
os._exit(9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_env(), capture_output=True, text=True
    )
    pid = int(done.stdout)
    wait_for(lambda: not runs(pid), seconds=20)


def test_the_screen_needs_no_torch() -> None:
    program = """
import sys
import localkv.commands.chat, localkv.tui.app, localkv.engine_process.client, localkv.chat.store
print([name for name in ("torch", "numba", "numpy", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_env(), capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


OPENS = """{{ bos_token }}{% for message in messages %}
{{- '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content }}{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}{{ style }}
{%- if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is not defined or enable_thinking %}{{ '<think>\n' }}{% endif %}
{%- endif %}"""


@pytest.fixture(scope="module")
def thinker(tiny_model: Path) -> Iterator[ChatEngine]:
    """A child whose template opens the reasoning; answers stay in its cache as they are."""
    options = EngineOptions(str(tiny_model), {**ARGUMENTS, "exact": False}, OPENS)
    engine = EngineProcess(options)
    facts = engine.load(lambda progress: None)
    assert (facts.has_think_switch, facts.takes_tools) == (True, True)
    yield engine
    engine.close()


def asked(**fields: object) -> ChatRequest:
    return ChatRequest(HELLO, GREEDY, max_tokens=12, ignore_eos=True, **fields)


def test_options_without_effect_are_among_the_warnings(tiny_model: Path) -> None:
    options = EngineOptions(
        str(tiny_model),
        ARGUMENTS,
        variables={"enable_thinking": True, "style": 3},
        uses=["tools", "reasoning_budget"],
    )
    facts = LocalEngine(options).load(lambda progress: None)
    assert (facts.has_think_switch, facts.takes_tools) == (False, False)
    assert [line for line in facts.warnings if "the chat template" in line] == [
        "the chat template does not read enable_thinking: it can't switch reasoning on or off",
        "the chat template does not read 'style', which has no effect",
        "the chat template does not read tools: the model is not told of them",
        "neither the chat template nor the vocabulary has a tag for reasoning, so a budget of it "
        "has no effect",
    ]


def test_reasoning_that_the_template_opens_shows(thinker: ChatEngine) -> None:
    assert said(thinker, asked())[0].startswith("<think>\n")
    assert not said(thinker, asked(think=False))[0].startswith("<think>")


def test_a_budget_of_reasoning(thinker: ChatEngine) -> None:
    free, _ = said(thinker, asked())
    text, finished = said(thinker, asked(reasoning_budget=3))
    thought, _, _ = text.partition("</think>")
    assert text.startswith("<think>\n")
    assert free.startswith(thought.rstrip())
    assert finished.completion_tokens == 12
    assert "<think>" not in said(thinker, asked(reasoning_budget=0))[0]


def test_a_prefill_is_the_first_text(engine: ChatEngine) -> None:
    text, finished = said(engine, asked(prefill="Once upon "))
    assert text.startswith("Once upon ")
    assert finished.completion_tokens == 12
    assert finished.prompt_tokens == engine.count_tokens(asked(prefill="Once upon "))
    assert finished.prompt_tokens > engine.count_tokens(asked())


@pytest.mark.parametrize("think", [None, False])
def test_a_cut_answer_goes_on(thinker: ChatEngine, think: bool | None) -> None:
    """From the rows that it left in the cache, as far as its text is read as the same tokens."""
    begun, first = said(thinker, asked(think=think, prefill="" if think is None else "The fox"))
    more, second = said(thinker, asked(think=think, continued=begun))
    assert more
    assert not more.startswith(("<think>", "The fox"))
    assert second.cached_tokens >= first.prompt_tokens
    assert second.prompt_tokens > first.prompt_tokens


def test_tools_and_variables_of_the_template(thinker: ChatEngine) -> None:
    plain = thinker.count_tokens(asked())
    assert thinker.count_tokens(asked(tools=({"name": "weather"},))) > plain
    assert thinker.count_tokens(asked(template_kwargs={"style": "as a pirate"})) > plain


def test_an_audit_of_the_last_answer(engine: ChatEngine) -> None:
    for audit in (False, True):
        text, finished = said(engine, ChatRequest(HELLO, GREEDY, max_tokens=12, audit=audit))
        (found,) = engine.audit()
        assert found.text == text
        assert found.n_tokens == finished.completion_tokens
        assert len(found.flips) == len(found.starts) == len(found.ends)
        assert f"of {found.n_tokens} tokens" in found.line


@pytest.mark.slow
def test_there_is_nothing_to_audit_before_an_answer(tiny_model: Path) -> None:
    engine = loaded(LocalEngine(EngineOptions(str(tiny_model), ARGUMENTS)))
    with pytest.raises(LocalKVError, match="no answer to audit"):
        list(engine.audit())
