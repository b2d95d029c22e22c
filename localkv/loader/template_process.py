"""Rendering a chat template in a process of its own, in which time and memory are limited."""

from __future__ import annotations

import marshal
from functools import partial
from typing import Any

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.template_program import MAX_MEMORY
from localkv.system.limited_process import ChildEndedError, LimitedProcesses

RENDER_SECONDS = 5.0
"""How long a template may take; real models' take milliseconds."""

MAX_SOURCE = 1 << 20
"""Characters of a template. Real models' have up to some 20,000."""

MAX_PROMPT, MAX_GROWTH = 1 << 20, 8
"""The most characters of a prompt, and the number added for each byte of the conversation."""

_HINT = "use another template (--chat-template-file)"

processes = LimitedProcesses(
    "localkv.loader.template_program",
    does="renders",
    many="chat templates",
    memory=MAX_MEMORY,
    refused=partial(ChatTemplateError, hint=_HINT),
)
start_ahead = processes.start_ahead


def rendered_apart(
    source: str, bos_token: str, eos_token: str, variables: dict[str, Any]
) -> list[tuple[str, bool]]:
    """The prompt in pieces, each with whether the template wrote it itself.

    Args:
        source: the Jinja program.
        bos_token, eos_token: texts of these tokens.
        variables: JSON values, `messages` among them.

    Raises:
        ChatTemplateError: the template is malformed or too long, fails or refuses the conversation,
            or takes too much time or memory.
        UsageError: the conversation is nested too deeply.
        LocalKVError: no process can be started.
    """
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(
            f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed",
            hint=_HINT,
        )
    try:
        data = marshal.dumps(variables)
    except ValueError:
        raise UsageError("the conversation is nested too deeply for a template") from None
    request = {
        "template": (source, bos_token, eos_token),
        "variables": data,
        "max_chars": MAX_PROMPT + MAX_GROWTH * len(data),
    }
    try:
        answer = processes.ask(request, "the chat template", RENDER_SECONDS)
    except ChildEndedError as error:
        raise ChatTemplateError(error.message, hint=_HINT) from None
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    return [(text, is_markup) for text, is_markup in answer["segments"]]
