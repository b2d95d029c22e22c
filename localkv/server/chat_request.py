"""A conversation that is to be answered, in OpenAI's words: what all dialects for chats lead to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from localkv.engine_process.texts import Submit
from localkv.loader.chat_prompt import ChatPrompt
from localkv.server import limits
from localkv.server.answer import AnswerReader, Answers
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front, opening_of
from localkv.server.request_fields import (
    RequestFields,
    adapters_of,
    grammar_for,
    place_of,
    stop_strings,
)
from localkv.server.request_record import warn
from localkv.tool_calls.family import CallReader
from localkv.tool_calls.tools import TOOL_CHOICES

T = TypeVar("T")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model reasons, in Anthropic's words; GLM's, DeepSeek's and Kimi's APIs have them
    beside OpenAI's."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: limits.Budget | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much the model reasons, in the words of OpenAI's Responses and OpenRouter."""

    effort: limits.Effort | None = None
    enabled: bool | None = None
    max_tokens: limits.Budget | None = None


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
    reasoning_effort: limits.Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    thinking_budget_tokens: limits.Budget | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbose: bool | None = None
    modalities: limits.Names | None = None
    functions: limits.Refused | None = None


async def rendered(front: Front, body: ChatBody, *, most: int | None = None) -> ChatPrompt:
    """The conversation as the model reads it.

    Args:
        most: tokens that there is room for; None where they are only counted.

    Raises:
        RequestError: the template refuses it.
    """
    limits.check_variables(body.chat_template_kwargs)
    goes_on = body.continue_final_message
    if goes_on is None and front.settings.prefills and not body.add_generation_prompt:
        goes_on = _ends_in_answer(body.messages)
    reasoning, thinking = body.reasoning or ReasoningOptions(), body.thinking
    switches, budgets = [body.enable_thinking], [body.thinking_budget_tokens]
    if thinking is not None:
        switches.append(thinking.type != "disabled")
        budgets.append(thinking.budget_tokens if thinking.type == "enabled" else None)
    switches.append(reasoning.enabled)
    budgets.append(reasoning.max_tokens)
    prompt = await front.conversation(
        body.messages,
        most=most,
        tools=asked_tools(body).shown,
        template_kwargs=body.chat_template_kwargs,
        enable_thinking=_first(switches),
        reasoning_effort=body.reasoning_effort or reasoning.effort,
        reasoning_budget=_first(budgets),
        continue_final_message=bool(goes_on),
        add_generation_prompt=body.add_generation_prompt,
    )
    warn(*prompt.warnings)
    return prompt


def _first(given: Iterable[T | None]) -> T | None:
    """The first value that is not None."""
    return next((value for value in given if value is not None), None)


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


class AskedTools(NamedTuple):
    """The functions of a request.

    Attributes:
        shown: the functions that the model reads about; None for none.
        allowed: the functions that it may call.
        choice: "auto", "required", "none", or the name of the function that it has to call.
    """

    shown: list[dict[str, Any]] | None
    allowed: list[dict[str, Any]]
    choice: str


def asked_tools(body: ChatBody) -> AskedTools:
    """The functions of a request; tools of other kinds are left out, with a warning.

    Raises:
        RequestError: a tool has no name, or one that is left out has to be called.
    """
    functions, others = list[dict[str, Any]](), dict[str, str]()
    for i, tool in enumerate(body.tools or ()):
        kind = tool.get("type") or "function"
        function = tool.get("function", tool)
        if kind != "function":
            others[_name_of(tool) or str(kind)] = str(kind)
        elif isinstance(function, dict) and isinstance(function.get("name"), str):
            functions.append(tool)
        else:
            raise RequestError(400, f"tools[{i}] has no name")
    choice, allowed = _tool_choice(body.tool_choice, functions, others)
    if choice == "none":
        return AskedTools(None, [], choice)
    if choice == "required" and others and not allowed:
        raise _no_function(", ".join(others), others.values())
    if others:
        warn(f"{_kinds(others.values())} are left out: only functions can be called here")
    return AskedTools(functions or None, allowed, choice)


def _tool_choice(
    given: str | Mapping[str, Any] | None,
    functions: list[dict[str, Any]],
    others: Mapping[str, str],
) -> tuple[str, list[dict[str, Any]]]:
    """What has to be called (`AskedTools.choice`), and the functions that may be.

    Args:
        others: the kinds of the other tools, by their names.

    Raises:
        RequestError: it is one of `others`, or `tool_choice` makes no sense.
    """
    if given is None or isinstance(given, str):
        if given and given in others:
            raise _no_function(given, [others[given]])
        return given or "auto", functions
    kind = given.get("type") or "function"
    if kind in TOOL_CHOICES:
        return str(kind), functions
    if kind == "allowed_tools":
        of = given.get("allowed_tools")
        of = of if isinstance(of, Mapping) else given
        mode, tools = of.get("mode", "auto"), of.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list):
            raise RequestError(
                400,
                "tool_choice: allowed_tools wants a mode, auto or required, and a list of tools",
                extra={"param": "tool_choice"},
            )
        names = [_name_of(tool) or str(tool.get("type")) for tool in tools if tool]
        known = {_name_of(tool): tool for tool in functions}
        if unknown := [name for name in names if name not in known and name not in others]:
            raise RequestError(
                400,
                f"tool_choice allows {unknown[0]!r:.100}, which is none of the tools",
                extra={"param": "tool_choice"},
            )
        return mode, [known[name] for name in dict.fromkeys(names) if name in known]
    name = _name_of(given)
    if kind != "function" or name in others:
        raise _no_function(name or str(kind), [str(others.get(name or "", kind))])
    if not name:
        raise RequestError(
            400,
            "tool_choice names no function",
            'use "auto", "required", "none", or {"type": "function", "function": {"name": ...}}',
            extra={"param": "tool_choice"},
        )
    return name, functions


def _name_of(tool: Any) -> str | None:
    """The name of a tool of any kind; some kinds have it in an object named like the kind."""
    if not isinstance(tool, Mapping):
        return None
    inner = tool.get(str(tool.get("type") or "function"), tool.get("function"))
    name = (inner if isinstance(inner, Mapping) else tool).get("name")
    return name if isinstance(name, str) and name else None


def _kinds(kinds: Iterable[str]) -> str:
    """Kinds of tools in a few words."""
    named = sorted(dict.fromkeys(kinds))
    return f"tools of type {', '.join(named):.200}"


def _no_function(name: str, kinds: Iterable[str]) -> RequestError:
    """The error about a required call of a tool that can't be called."""
    return RequestError(
        400,
        f"tool_choice wants a call of {name:.100}, and {_kinds(kinds)} can't be called here",
        "describe it as a function, or leave tool_choice out",
        extra={"param": "tool_choice"},
    )


async def begun(front: Front, body: ChatBody) -> Answers:
    """Begin to answer a conversation.

    Raises:
        RequestError: it can't be answered.
    """
    _check(body)
    model, asked = await front.model(), asked_tools(body)
    family, tools, grammar = await front.in_thread(
        model.calls,
        asked.allowed,
        asked.choice,
        parallel=body.parallel_tool_calls is not False,
        answer=await grammar_for(front, body),
    )
    warn(*tools.warnings)
    prompt = await rendered(front, body, most=front.facts.engine.n_ctx)
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
        lora=adapters_of(front, body.lora),
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


def _check(body: ChatBody) -> None:
    """Refuse what makes no sense, or is not there.

    Raises:
        RequestError: says what.
    """
    if not body.messages:
        raise RequestError(400, "messages is empty", "send at least one")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs: true")
    if body.functions:
        raise unsupported("functions", "use tools, which replaced it")
    others = set(body.modalities or ()) - {"text"}
    if others:
        raise unsupported(f"the modality {sorted(others)[0]!r}", "this model writes text")
