"""Conversations with tools by the client libraries of all dialects, with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from support.conversations import ANSWERS, CONVERSATIONS, FILES
from support.paths import DATA, TESTS
from support.scripted_server import ASK
from support.server import RunningServer

REQUESTS = json.loads((DATA / "agent_requests.json").read_text())
"""What agents send, by their names."""
AGENTS = {"claude": "Read", "codex": "exec_command", "opencode": "The number is 4711."}
"""What the answer to each of them has."""
REQUIRED: dict[str, Any] = {"claude": {"type": "any"}, "codex": "required", "opencode": "required"}


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    """A server whose template refuses system messages after the first message."""
    program = (str(TESTS / "support" / "scripted_server.py"),)
    template = str(DATA / "strict.jinja")
    running = RunningServer(
        *("-a", "tales", "-c", "8192", "--chat-template-file", template), program=program
    ).wait()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
@pytest.mark.parametrize("client", CONVERSATIONS)
def test_two_turns_with_a_tool(scripted: RunningServer, client: str, streams: bool):
    talk = CONVERSATIONS[client](scripted.url, "tales", streams=streams)
    assert talk.calls == list(FILES)
    assert talk.answers == ANSWERS


@pytest.mark.parametrize("agent", AGENTS)
def test_what_an_agent_sends_is_answered(scripted: RunningServer, agent: str):
    path, body = REQUESTS[agent]["path"], REQUESTS[agent]["body"]
    assert body["stream"]
    status, events = scripted.post(path, body)
    assert status == 200
    assert "event: error" not in events
    status, answer = scripted.post(path, {**body, "stream": False})
    assert status == 200
    assert AGENTS[agent] in json.dumps(answer)


@pytest.mark.parametrize("agent", AGENTS)
def test_the_tools_of_an_agent_can_be_required(scripted: RunningServer, agent: str):
    body = {**REQUESTS[agent]["body"], "stream": False, "tool_choice": REQUIRED[agent]}
    assert scripted.post(REQUESTS[agent]["path"], body)[0] == 200


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
def test_anthropics_runner_of_tools_ends(scripted: RunningServer, streams: bool):
    """It asks the server to store the conversation, and goes on where that says no."""

    @anthropic.beta_tool
    def read_file(path: str) -> str:
        """Read a file."""
        return FILES[path]

    path = next(iter(FILES))
    asked: Any = [{"role": "user", "content": ASK.format(path=path)}]
    with anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0) as client:
        runner: Any = client.beta.messages.tool_runner(
            model="tales", max_tokens=200, messages=asked, tools=[read_file], stream=streams
        )
        last = runner.until_done()
    assert last.content[0].text == ANSWERS[0]
