"""Messages between an engine's process and its client: what is read is what was written."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest

from localkv.chat.engine import ChatRequest, EngineOptions, Finished
from localkv.engine_process.wire import (
    Ask,
    Load,
    Message,
    Refused,
    Told,
    decoder,
    framed,
    from_conversation,
    named_error,
    read_message,
)
from localkv.errors import ContextOverflowError, LocalKVError, ModelFileError, UsageError
from localkv.sampling.params import SamplingParams
from support.fake_engine import FACTS

DONE = Finished("stop", 5, 7, 3, 0.1, 0.2, 35.0, 42)


def through_the_wire(message: Message) -> Any:
    """What the other side reads."""
    body = read_message(BytesIO(framed(message)))
    assert body is not None
    return decoder(type(message))(body)


def test_values_go_through_the_wire_unchanged() -> None:
    params = SamplingParams(seed=3, logit_bias={7: float("-inf")}, dry_sequence_breakers=("a",))
    for text in ("\n 日", "\ud800 \n 日"):
        request = ChatRequest([{"role": "user", "content": text}], params, 5, ["x"])
        assert through_the_wire(Ask(1, "answer", request)) == Ask(
            1, "answer", replace(request, tools=[])
        )
    load = Load(EngineOptions("/\udcff.gguf", {"n_ctx": 3, "tags": [1.5, None]}, uses=["tools"]))
    for message in (load, Told(2, finished=DONE), Told(facts=FACTS)):
        assert through_the_wire(message) == message


def test_errors_go_through_the_wire_as_their_nearest_relatives() -> None:
    for error, kind in (
        (ContextOverflowError("full", "more"), ContextOverflowError),
        (UsageError("wrong"), UsageError),
        (ModelFileError("broken"), LocalKVError),
    ):
        told = through_the_wire(Refused.of(1, error))
        back = named_error(told.kind, told.message, told.hint)
        assert type(back) is kind
        assert (back.message, back.hint) == (error.message, error.hint)


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b'{"type": "Unknown"}', b"hello", b"{", b"", b"\xc1"]
)
def test_other_bytes_are_no_messages(body: bytes) -> None:
    with pytest.raises(ValueError, match="no message"):
        from_conversation(body)
