"""A conversation that is to be answered, in OpenAI's words: what all dialects for chats lead to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from localkv.loader.chat_prompt import ChatPrompt
from localkv.server import limits
from localkv.server.answer import AnswerReader
from localkv.server.answers import Answers
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front, opening_of
from localkv.server.request_fields import RequestFields, grammar_for, place_of
from localkv.server.request_record import current
from localkv.server.sampling_fields import stop_strings
from localkv.server.wire import Submit
from localkv.tool_calls.reader import CallReader


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ChatBody(RequestFields, kw_only=True):
    """The fields that mean something here; others are ignored."""

    messages: limits.Messages
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: limits.Logprobs | None = None
    tools: limits.Tools | None = None
    tool_choice: limits.Name | limits.Object | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: limits.Variables | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    reasoning_effort: limits.Word | None = None
    enable_thinking: bool | None = None
    thinking_budget_tokens: limits.Budget | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbose: bool | None = None
    modalities: limits.Names | None = None
    functions: limits.Refused | None = None


async def rendered(front: Front, body: ChatBody) -> ChatPrompt:
    """The conversation as the model reads it.

    Raises:
        RequestError: the template refuses it.
    """
    goes_on = body.continue_final_message
    if goes_on is None and front.settings.prefills and not body.add_generation_prompt:
        goes_on = _ends_in_answer(body.messages)
    prompt = await front.conversation(
        body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        template_kwargs=_template_kwargs(body),
        enable_thinking=body.enable_thinking,
        reasoning_budget=body.thinking_budget_tokens,
        continue_final_message=bool(goes_on),
        add_generation_prompt=body.add_generation_prompt,
    )
    if (record := current.get()) is not None:
        record.warnings = (*record.warnings, *prompt.warnings)
    return prompt


def _ends_in_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of an answer.

    Raises:
        RequestError: so is the one before it.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not last.get("content") or last.get("tool_calls"):
        return False
    if len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise RequestError(
            400,
            "the last two messages are the assistant's, and only one can go on",
            "put them together, or set continue_final_message to false",
        )
    return True


async def begun(front: Front, body: ChatBody) -> Answers:
    """Begin to answer a conversation.

    Raises:
        RequestError: it can't be answered.
    """
    front.check_model(body.model)
    _check(body)
    model = await front.model()
    family, tools, grammar = await front.apart(
        model.calls,
        body.tools or (),
        body.tool_choice or "auto",
        parallel=body.parallel_tool_calls is not False,
        answer=await grammar_for(front, body),
    )
    if (record := current.get()) is not None:
        record.warnings = (*record.warnings, *tools.warnings)
    prompt = await rendered(front, body)
    n = body.n or 1
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    submit = Submit(
        0,
        prompt.ids,
        await front.params(body),
        max_tokens=front.n_predict(body.max_completion_tokens, body.max_tokens, body.n_predict),
        stop=stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        chat=opening_of(prompt),
        grammar=grammar,
        reuses=body.reuses,
        place=place_of(front, body),
    )
    texts = await front.begin(submit, n)
    opened = prompt.reasoning.open if prompt.reasoning and not prompt.opening else ""
    keeps = (body.reasoning_format or front.settings.reasoning_format) == "none"
    readers = [
        AnswerReader(
            CallReader(family, tools) if tools else None, keeps_reasoning=keeps, opened=opened
        )
        for _ in range(n)
    ]
    return Answers(texts, readers, prompt.text, len(prompt.ids))


def _template_kwargs(body: ChatBody) -> dict[str, Any] | None:
    """Variables of the template; `reasoning_effort` is one that gpt-oss's reads."""
    limits.check_variables(body.chat_template_kwargs)
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    return {"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})}


def _check(body: ChatBody) -> None:
    """Refuse what makes no sense, or is not there.

    Raises:
        RequestError: says what.
    """
    if not body.messages:
        raise RequestError(400, "messages is empty", "send at least one")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs: true")
    for i, tool in enumerate(body.tools or ()):
        function = tool.get("function", tool)
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise RequestError(400, f"tools[{i}] has no name")
    if body.functions:
        raise unsupported("functions", "use tools, which replaced it")
    others = set(body.modalities or ()) - {"text"}
    if others:
        raise unsupported(f"the modality {sorted(others)[0]!r}", "this model writes text")
