"""gpt-oss's calls: messages to a recipient, `<|channel|>commentary to=functions.NAME`.

`localkv.loader.answer_tags` makes calls in Hermes' manner of them before anybody reads the text, so
they are parsed as those; only the grammar is of what the model itself writes.
(https://cookbook.openai.com/articles/openai-harmony)
"""

from __future__ import annotations

from collections.abc import Sequence

from localkv.tool_calls import hermes
from localkv.tool_calls.family import (
    CallRules,
    Family,
    Term,
    any_call,
    arguments_of,
    quoted,
    text_rule,
)
from localkv.tool_calls.tools import Tool


def _rules(tools: Sequence[Tool], term: Term) -> CallRules:
    channel, message, start = term("<|channel|>"), term("<|message|>"), term("<|start|>")
    rules = [
        f"call_{i}: {quoted(f'commentary to=functions.{tool.name} ')} {term('<|constrain|>')} "
        f'"json" {message} {arguments_of(tool)}'
        for i, tool in enumerate(tools)
    ]
    rules += [
        text_rule("thinking", "<|end|>", term),
        f'thought: {channel} "analysis" {message} thinking {start} "assistant"',
    ]
    calls = any_call(tools)
    return CallRules("<|channel|>", calls, calls, rules, before="thought?")


HARMONY = Family("harmony", hermes.parse, _rules)
