"""What a server does where requests say nothing: reasoning, templates, names, addresses."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from localkv.errors import UsageError
from localkv.server.http_server import listening
from support.paths import MODELS
from support.program import Program
from support.server import RunningServer

MODEL = str(MODELS / "tales-4M-Q8_0.gguf")
THINKING = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me of a dog."}],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
}
CHAT = "/v1/chat/completions"


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningServer]:
    """One whose model reasons for four tokens."""
    hosts = "127.0.0.1,::1" if _has_ipv6() else "127.0.0.1"
    running = RunningServer(
        *("-a", "first,second", "--tags", "small, toy", "--chat-template", THINKING),
        *("--reasoning-budget", "4", "--no-metrics", "--no-prefill-assistant", "--host", hosts),
        *("-md", str(MODELS / "tales-draft-Q8_0.gguf")),
    ).wait()
    yield running
    assert running.stop() == 0


def _message(server: RunningServer, **fields: Any) -> dict[str, Any]:
    status, answer = server.post(CHAT, {**ASK, **fields})
    assert status == 200, answer
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def test_reasoning_has_a_field_of_its_own(thinking: RunningServer):
    message = _message(thinking)
    assert message["reasoning_content"]
    assert message["content"]
    assert "<think>" not in str(message)
    plain = _message(thinking, reasoning_format="none")
    assert "reasoning_content" not in plain
    assert "</think>" in plain["content"]
    assert "reasoning_content" not in _message(thinking, enable_thinking=False)
    off = _message(thinking, chat_template_kwargs={"enable_thinking": False})
    assert off == _message(thinking, enable_thinking=False)
    longer = _message(thinking, thinking_budget_tokens=8)
    assert longer["reasoning_content"].startswith(message["reasoning_content"])
    assert len(longer["reasoning_content"]) > len(message["reasoning_content"])


def test_what_the_model_is_called(thinking: RunningServer):
    (model,) = thinking.get("/v1/models")[1]["data"]
    assert model["id"] == "first"
    assert set(model["aliases"]) == {"first", "second"}
    assert model["tags"] == ["small", "toy"]


def test_what_is_switched_off(thinking: RunningServer):
    assert thinking.get("/metrics")[0] == 501
    answered = {**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": "The"}]}
    prompt = thinking.post("/apply-template", answered)[1]["prompt"]
    assert prompt.endswith("assistant: The\nassistant: <think>")


def test_the_start_says_how_long_it_took_and_what_has_no_effect(thinking: RunningServer):
    assert "warmed up in" in thinking.lines[-1]
    assert thinking.get("/localkv/cache")[1]["pages"]["lost"] == 0
    silent = RunningServer("--reasoning", "on", "--chat-template", "chatml").wait()
    try:
        assert any("--reasoning on has no effect" in line for line in silent.lines)
        prompt = silent.post("/apply-template", ASK)[1]["prompt"]
        assert prompt.endswith("<|im_start|>assistant\n")
    finally:
        assert silent.stop() == 0


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback")
def test_every_address_answers(thinking: RunningServer):
    first, second = (
        thinking.url,
        next(line for line in thinking.lines if "listening on" in line)
        .split(" and ")[1]
        .split(";")[0],
    )
    assert second.startswith("http://[::1]:")
    assert second.rpartition(":")[2] == first.rpartition(":")[2]
    thinking.url = second
    try:
        assert thinking.get("/health")[0] == 200
    finally:
        thinking.url = first


def test_a_draft_changes_no_text(thinking: RunningServer, server: RunningServer):
    body = {"prompt": "Once upon a time there was a fox", "n_predict": 60, "temperature": 0}
    assert (
        thinking.post("/completion", body)[1]["content"]
        == (server.post("/completion", body)[1]["content"])
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--chat-template", "llama99"], "no chat template called 'llama99'"),
        (["--chat-template", "chatml", "--chat-template-file", MODEL], "exclude each other"),
        (["--host", ","], "--host has no address"),
        (["--reasoning", "maybe"], "maybe"),
    ],
)
def test_what_is_refused(program: Program, options: list[str], says: str):
    done = program("serve", "-m", MODEL, *options)
    assert done.code != 0
    assert says in done.err


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError) as refused:
            listening("127.0.0.1", port)
    assert refused.value.message == f"can't listen on 127.0.0.1:{port}: Address already in use"
