"""Which family's syntax a chat template writes calls in: found by rendering a conversation."""

from __future__ import annotations

import re
from functools import lru_cache

from localkv.errors import LocalKVError
from localkv.loader.answer_tags import writes_channels
from localkv.loader.chat_messages import messages_for
from localkv.loader.chat_template import ChatTemplate
from localkv.tool_calls import (
    cohere,
    deepseek,
    gemma,
    glm,
    hermes,
    invoke_tags,
    json_call,
    kimi,
    mistral,
    xml_parameters,
)
from localkv.tool_calls.family import Family

_MARKED = (
    (invoke_tags.DSML_V4_MARK, invoke_tags.DSML_V4),
    (invoke_tags.DSML_MARK, invoke_tags.DSML),
    (kimi.ARGUMENTS, kimi.KIMI),
    (invoke_tags.MINIMAX_OPEN, invoke_tags.MINIMAX),
    (xml_parameters.SEED_OPEN, xml_parameters.SEED_OSS),
    (glm.KEY, glm.GLM),
    (cohere.ACTION, cohere.COMMAND),
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
        return hermes.HARMONY
    shown = _shown(template) or template.source  # some leave calls out, and know their marks
    for mark, family in _MARKED:
        if mark in shown:
            return family
    if deepseek.CALL in shown:
        return deepseek.DEEPSEEK_FENCED if "```json" in shown else deepseek.DEEPSEEK
    if mistral.CALLS in shown:
        if mistral.ARGS not in shown:
            return mistral.MISTRAL_LIST
        return mistral.MISTRAL_ID if mistral.CALL_ID in shown else mistral.MISTRAL
    if re.search(rf"<tool_call>\s*<function={_NAME}>\s*<parameter=word>", shown):
        return xml_parameters.QWEN_CODER
    if f"{gemma.OPEN}call:{_NAME}" in shown:
        return gemma.GEMMA4
    if re.search(hermes.OPEN + _OBJECT, shown) or re.search(_TOLD, shown):
        return hermes.HERMES
    if cohere.FENCED in shown and "tool_name" in shown:
        return cohere.COMMAND_R
    if re.search(_OBJECT + r'",\s*"parameters"', shown):
        return json_call.LLAMA3
    return json_call.GENERIC


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
