"""Conversations with tools by the client libraries of all dialects, with a scripted model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.conversations import ANSWERS, CONVERSATIONS, FILES
from support.paths import DATA, TESTS
from support.server import RunningServer


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
