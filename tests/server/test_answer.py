"""Reading an answer: a cut one is the beginning of a whole one."""

from __future__ import annotations

from typing import Any

import pytest

from localkv.loader.answer_tags import ANSWER_TAGS, CHANNELS, REASONING_TAGS
from localkv.server.answer import AnswerReader, Reasoning
from localkv.tool_calls.family import CallReader
from localkv.tool_calls.json_object import HERMES
from localkv.tool_calls.source import CallArguments, Content
from localkv.tool_calls.tools import Tools

TOOLS = Tools([{"name": "look"}])
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a < b"}}\n</tool_call>'


def parts(pieces: list[str], *, is_cut: bool) -> dict[type[Any], str]:
    reader = AnswerReader(CallReader(HERMES, TOOLS))
    deltas = [delta for piece in pieces for delta in reader.push(piece)]
    found = {Reasoning: "", Content: "", CallArguments: ""}
    for delta in [*deltas, *reader.end(is_cut=is_cut)]:
        if type(delta) in found:
            found[type(delta)] += delta.text  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("tags", [tags for tags in REASONING_TAGS if tags != CHANNELS])
@pytest.mark.parametrize(
    "answer", ["Yes, 1 < 2.", f"Yes.\n{CALL}\n{CALL}", *(f"{a}Yes.{b}" for a, b in ANSWER_TAGS)]
)
def test_a_cut_answer_is_the_beginning_of_a_whole_one(tags: Any, answer: str) -> None:
    text = f"{tags.open}\nHm, 1 < 2?\n{tags.close}\n\n{answer}"
    whole = parts([text], is_cut=False)
    for at in range(len(text)):
        begun = parts([text[:at]], is_cut=True)
        assert all(whole[kind].startswith(piece) for kind, piece in begun.items()), text[:at]
        assert parts(list(text[:at]), is_cut=True) == begun
