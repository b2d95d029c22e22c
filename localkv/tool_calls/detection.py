"""The family whose syntax a chat template writes calls in, found by rendering a conversation."""

from __future__ import annotations

import re
from functools import lru_cache

from localkv.errors import LocalKVError
from localkv.loader.answer_tags import writes_channels
from localkv.loader.chat_messages import messages_for
from localkv.loader.chat_template import ChatTemplate
from localkv.tool_calls.family import Family
from localkv.tool_calls.gemma import GEMMA4, GEMMA4_OPEN
from localkv.tool_calls.json_object import (
    COMMAND,
    COMMAND_ACTION,
    COMMAND_R,
    COMMAND_R_ACTION,
    GENERIC,
    HARMONY,
    HERMES,
    HERMES_OPEN,
    LLAMA3,
)
from localkv.tool_calls.named_object import (
    DEEPSEEK,
    DEEPSEEK_CALL,
    DEEPSEEK_FENCED,
    KIMI,
    KIMI_ARGUMENTS,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_CALL_ID,
    MISTRAL_CALLS,
    MISTRAL_ID,
    MISTRAL_LIST,
)
from localkv.tool_calls.tagged_arguments import (
    DSML,
    DSML_MARK,
    DSML_V4,
    DSML_V4_MARK,
    GLM,
    GLM_KEY,
    MINIMAX,
    MINIMAX_OPEN,
    QWEN_CODER,
    SEED_OPEN,
    SEED_OSS,
)

_MARKED = (
    (DSML_V4_MARK, DSML_V4),
    (DSML_MARK, DSML),
    (KIMI_ARGUMENTS, KIMI),
    (MINIMAX_OPEN, MINIMAX),
    (SEED_OPEN, SEED_OSS),
    (GLM_KEY, GLM),
    (COMMAND_ACTION, COMMAND),
)
"""Families that a mark of their own shows."""

_NAME, _ASKED = "localkv_probe", "localkv-asked"
_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
_FUNCTION = {"name": _NAME, "description": "A probe.", "parameters": _PARAMETERS}
_CALL = {"name": _NAME, "arguments": {"word": "localkv-word"}}
_TOLD = r'<tool_call>(\\n|\s)*\{\\?"name\\?":\s*<function-name>'
"""How a template tells of Hermes' syntax that shows no call in it."""
_OBJECT = r'\s*\{"name":\s*"' + _NAME


@lru_cache(maxsize=16)
def family_of(template: ChatTemplate) -> Family:
    """How a model writes calls whose chat template this is.

    A template that shows no syntax, or none that is known, gets `GENERIC`.
    """
    if writes_channels(template.source):
        return HARMONY
    shown = _shown(template) or template.source  # some leave calls out, and know their marks
    for mark, family in _MARKED:
        if mark in shown:
            return family
    if DEEPSEEK_CALL in shown:
        return DEEPSEEK_FENCED if "```json" in shown else DEEPSEEK
    if MISTRAL_CALLS in shown:
        if MISTRAL_ARGS not in shown:
            return MISTRAL_LIST
        return MISTRAL_ID if MISTRAL_CALL_ID in shown else MISTRAL
    if re.search(rf"<tool_call>\s*<function={_NAME}>\s*<parameter=word>", shown):
        return QWEN_CODER
    if f"{GEMMA4_OPEN}call:{_NAME}" in shown:
        return GEMMA4
    if re.search(HERMES_OPEN + _OBJECT, shown) or re.search(_TOLD, shown):
        return HERMES
    if COMMAND_R_ACTION in shown and "tool_name" in shown:
        return COMMAND_R
    if re.search(_OBJECT + r'",\s*"parameters"', shown):
        return LLAMA3
    return GENERIC


def _shown(template: ChatTemplate) -> str:
    """What the template makes of a call; "" if it makes nothing of one."""
    call = {"id": "probe0000", "type": "function", "function": _CALL}
    user = {"role": "user", "content": _ASKED}
    for content in ("", None):
        said = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            prompt = template.render(
                messages_for(template, [user, said]),
                tools=[{"type": "function", "function": _FUNCTION}],
                add_generation_prompt=False,
            )
        except LocalKVError:
            continue
        answer = prompt.rpartition(_ASKED)[2]
        if _NAME in answer:
            return answer
    return ""
