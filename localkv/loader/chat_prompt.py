"""`ChatPrompt`: a conversation as a model reads it, up to the place where its answer goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from localkv.errors import ChatTemplateError, UsageError
from localkv.loader.answer_tags import (
    CHANNELS,
    EFFORTS,
    PRESERVE,
    REASONING_TAGS,
    THINK_TAGS,
    ReasoningTags,
    in_channels,
    tags_at_end,
    tags_at_start,
    writes_channels,
)
from localkv.loader.chat_messages import (
    Message,
    in_turns,
    messages_for,
    shows_calls,
    shows_tools,
    tools_for,
)
from localkv.loader.chat_template import THINK, ChatTemplate, ChatTokenizer, Segment, encode_prompt

EFFORT = "reasoning_effort"
"""The variable that tells some templates, gpt-oss's first, how much the model reasons."""

_RESERVED = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
)


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
        ids: the whole prompt.
        text: the same as text, for showing.
        opening: the end of the prompt that is the beginning of the answer's text: a prefill, or the
            tag with which the template opens the reasoning.
        is_begun: the prompt ends within the answer.
        reasoning: the tags of the reasoning that the prompt ends in, or None.
        n_reasoned: tokens of that reasoning that are in the prompt.
        reasoning_budget: most tokens of reasoning in the answer; None sets no limit.
        warnings: one line for each argument that has no effect with this template, and for each way
            in which the order of roles was changed for it.
    """

    ids: list[int]
    text: str
    opening: str = ""
    is_begun: bool = False
    reasoning: ReasoningTags | None = None
    n_reasoned: int = 0
    reasoning_budget: int | None = None
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<ChatPrompt: {len(self.ids)} tokens, {self.text!r}>"


def chat_prompt(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None = None,
    template_kwargs: Mapping[str, object] | None = None,
    enable_thinking: bool | None = None,
    reasoning_budget: int | None = None,
    reasoning_effort: str | None = None,
    preserve_reasoning: bool | None = None,
    prefill: str = "",
    continued: str = "",
    continue_final_message: bool | str = False,
    add_generation_prompt: bool | None = None,
    check: Callable[[str], None] | None = None,
) -> ChatPrompt:
    """Render a conversation and turn it into tokens. `LLM.chat` describes the arguments.

    Args:
        check: raises if the rendered text is too long to be turned into tokens.

    Raises:
        ChatTemplateError: the template fails on this conversation, or refuses it.
        UsageError: a message is not one, or arguments contradict each other.
    """
    _check_beginnings(prefill, continued, continue_final_message, add_generation_prompt)
    last = messages[-1] if messages else {}
    if prefill and last.get("role") == "assistant":
        raise UsageError(
            "prefill begins an answer, and the last message is one already",
            hint="continue_final_message=True goes on with it",
        )
    if _is_reasoned_in_channels(template, prefill):
        continued = prefill
    elif continue_final_message is True and _is_reasoned_in_channels(template, last.get("content")):
        messages, continued, continue_final_message = messages[:-1], str(last["content"]), False
    messages, rearranged = in_turns(
        template, messages_for(template, messages), has_tools=bool(tools)
    )
    budget = _checked_budget(reasoning_budget)
    variables = _variables(template, template_kwargs, enable_thinking, preserve_reasoning)
    switch = template.think_switch
    if reasoning_effort is not None:
        budget = _with_effort(tokenizer, template, variables, reasoning_effort, budget)
    if budget == 0 and switch is not None and switch not in variables:
        variables[switch] = False
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    given = {"tools": tools, "tool_calls": calls, "reasoning_budget": budget is not None}
    used = [name for name, value in given.items() if value]
    warnings = (*rearranged, *without_effect(tokenizer, template, variables, used))
    variables = _preserving(template, variables)
    variables["tools"] = tools_for(template, tools)
    if prefill and not continued:
        messages.append({"role": "assistant", "content": prefill})
        continue_final_message = True
    if continue_final_message:
        segments, begun = _final_message(template, messages, variables, continue_final_message)
    elif continued:
        segments, begun = _continuation(template, messages, variables, continued)
    else:
        is_asked = add_generation_prompt is not False
        segments = template.render_segments(messages, add_generation_prompt=is_asked, **variables)
        begun = ""
    text = _joined(segments)
    if check is not None:
        check(text)
    tags, reasoned = _open_reasoning(template, segments, begun)
    return ChatPrompt(
        encode_prompt(tokenizer, segments),
        text,
        opening=begun if prefill else "" if begun else _opening(segments),
        is_begun=bool(begun),
        reasoning=tags,
        n_reasoned=_n_tokens(tokenizer, reasoned) if reasoned else 0,
        reasoning_budget=budget,
        warnings=warnings,
    )


def _with_effort(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    variables: dict[str, Any],
    effort: str,
    budget: int | None,
) -> int | None:
    """Set the variables for an effort of reasoning; return the budget that it leaves.

    "none" switches reasoning off and ends it at once, unless the model does not reason. The
    template reads the other efforts.
    """
    if effort not in EFFORTS:
        raise UsageError(f"{EFFORT} is {effort!r:.60}", hint=f"one of {', '.join(EFFORTS)}")
    if effort != "none":
        variables.setdefault(EFFORT, effort)
        return budget
    if variables.get(template.think_switch or THINK):
        raise UsageError(f"{EFFORT} is none, and reasoning is switched on")
    if template.think_switch is None and EFFORT not in variables and template.reads(EFFORT):
        with suppress(ChatTemplateError):  # some refuse the word
            template.render([{"role": "user", "content": "a"}], reasoning_effort=effort)
            variables[EFFORT] = effort
    is_known = template.think_switch is not None or _knows_reasoning(tokenizer, template)
    return 0 if is_known else budget


def _check_beginnings(
    prefill: str, continued: str, continue_final_message: bool | str, add: bool | None
) -> None:
    given = {
        "prefill": prefill,
        "continued": continued,
        "continue_final_message": continue_final_message,
    }
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} say how the answer begins: give one of them")
    if names and add is not None and add != bool(continued):
        raise UsageError(f"add_generation_prompt={add} contradicts {names[0]}")


def _checked_budget(most: int | None) -> int | None:
    if most is not None and most < -1:
        raise UsageError(f"reasoning_budget must be -1 or more, not {most}")
    return None if most == -1 else most


def _knows_reasoning(tokenizer: ChatTokenizer, template: ChatTemplate) -> bool:
    return writes_channels(template.source) or any(
        tag in template.source or _n_tokens(tokenizer, tag, is_markup=True) == 1
        for tags in REASONING_TAGS
        for tag in tags
    )


def _n_tokens(tokenizer: ChatTokenizer, text: str, *, is_markup: bool = False) -> int:
    return len(tokenizer.encode_segments([(text, is_markup)], add_special=False))


def _variables(
    template: ChatTemplate,
    template_kwargs: Mapping[str, object] | None,
    enable_thinking: bool | None,
    preserve_reasoning: bool | None,
) -> dict[str, Any]:
    """The variables of a template that not every template has."""
    variables: dict[str, Any] = dict(template_kwargs or {})
    for name in variables:
        if not isinstance(name, str):
            raise UsageError(f"template_kwargs: {name!r} is not a name")
        if name in _RESERVED:
            raise UsageError(f"template_kwargs can't have {name!r}, which every template is given")
    for name, value in ((THINK, enable_thinking), (PRESERVE, preserve_reasoning)):
        if value is not None:
            if variables.get(name, value) is not value:
                raise UsageError(f"{name} is {value}, and another in template_kwargs")
            variables[name] = value
    return _switched(template, variables)


def _preserving(template: ChatTemplate, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with those that keep the reasoning of earlier answers, or leave it out. It is
    kept where nothing is said, as llama.cpp has it: what the model wrote is in the cache."""
    wanted = variables.get(PRESERVE, True)
    if not isinstance(wanted, bool):
        raise UsageError(f"{PRESERVE} must be true or false, not {wanted!r:.60}")
    kept = {k: v for k, v in variables.items() if k != PRESERVE or template.reads(PRESERVE)}
    return {**template.preserving(wanted), **kept}


def _switched(template: ChatTemplate, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with the switch for reasoning by the name that this template has for it."""
    variables, switch = dict(variables), template.think_switch
    if THINK in variables and switch is not None and switch != THINK:
        variables.setdefault(switch, variables.pop(THINK))
    return variables


def without_effect(
    tokenizer: ChatTokenizer,
    template: ChatTemplate,
    variables: Mapping[str, object],
    used: Collection[str],
) -> tuple[str, ...]:
    """A line for each argument that has no effect with this template.

    Args:
        variables: of the template.
        used: "tools", "tool_calls" and "reasoning_budget", if there are any.
    """
    variables = _switched(template, variables)
    is_asked = variables.pop(PRESERVE, None) is not None
    unread = [name for name in variables if not template.reads(name)]
    lines = []
    if THINK in unread:
        unread.remove(THINK)
        can_end = not variables[THINK] and _knows_reasoning(tokenizer, template)
        instead = "; a reasoning budget of 0 ends it at once" if can_end else ""
        lines.append(
            f"the chat template does not read {THINK}: it can't switch reasoning on or off{instead}"
        )
    lines += [f"the chat template does not read {name!r}, which has no effect" for name in unread]
    if is_asked and not template.preserving(True) and not template.reads(PRESERVE):
        lines.append(
            "the chat template decides by itself whether the reasoning of earlier answers is kept, "
            f"so {PRESERVE} has no effect"
        )
    if "tools" in used and not shows_tools(template):
        lines.append("the chat template does not read tools: the model is not told of them")
    if "tool_calls" in used and not shows_calls(template):
        lines.append("the chat template does not read tool_calls: they are left out")
    if "reasoning_budget" in used and not _knows_reasoning(tokenizer, template):
        lines.append(
            "neither the chat template nor the vocabulary has a tag for reasoning, so a budget of "
            "it has no effect"
        )
    return tuple(lines)


def _is_reasoned_in_channels(template: ChatTemplate, text: object) -> bool:
    """Whether a begun answer begins with reasoning, which goes into a channel."""
    is_reasoned = isinstance(text, str) and tags_at_start(text) == THINK_TAGS
    return is_reasoned and writes_channels(template.source)


def _final_message(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    field: bool | str,
) -> tuple[list[Segment], str]:
    """A prompt that ends within the last message; and the text of that at its end."""
    segments = template.render_segments(
        messages, add_generation_prompt=False, continue_final_message=field, **variables
    )
    content = messages[-1].get(field if isinstance(field, str) else "content")
    if isinstance(content, list | tuple):
        content = next((part["text"] for part in reversed(content) if part.get("text")), "")
    text, prompt = str(content), _joined(segments)
    trimmed = (text, text.rstrip(), text.lstrip(), text.strip())
    return segments, next((end for end in trimmed if prompt.endswith(end)), text)


def _continuation(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    continued: str,
) -> tuple[list[Segment], str]:
    """A prompt that goes on with what the model wrote after it; and the text of that at its end."""
    tags, switch = tags_at_start(continued), template.think_switch or THINK
    if tags is not None and variables.get(switch) is False:
        variables = {**variables, switch: True}
    segments = template.render_segments(messages, add_generation_prompt=True, **variables)
    if writes_channels(template.source):
        return [*segments, *(Segment(*piece) for piece in in_channels(continued))], continued
    opening = _opening(segments)
    opened = tags_at_start(opening)
    if opened is not None and tags is None:
        # it was written when the template opened no reasoning
        answer = {"role": "assistant", "content": continued}
        return _final_message(template, [*messages, answer], variables, True)
    if tags is None:
        return [*segments, Segment(continued, False)], continued
    if tags == opened:
        spaces = opening.removeprefix(tags.open)
        continued = continued.lstrip().removeprefix(tags.open).removeprefix(spaces)
    return [*segments, *_tagged(continued, tags, is_open=tags == opened)], continued


def _tagged(text: str, tags: ReasoningTags, *, is_open: bool) -> list[Segment]:
    """An answer with reasoning, whose tags the model wrote as tags."""
    pieces = []
    if not is_open:
        before, opening, text = text.partition(tags.open)
        pieces = [Segment(before, False), Segment(opening, True)]
    reasoning, closing, answer = text.partition(tags.close)
    pieces += [Segment(reasoning, False), Segment(closing, True), Segment(answer, False)]
    return [piece for piece in pieces if piece.text]


def _opening(segments: Sequence[Segment]) -> str:
    """The end of a prompt with which the template opens the reasoning, from the tag on."""
    markup = ""
    for text, is_markup in reversed(segments):
        if not is_markup:
            break
        markup = text + markup
    tags = tags_at_end(markup)
    return markup[markup.rindex(tags.open) :] if tags is not None else ""


def _open_reasoning(
    template: ChatTemplate, segments: Sequence[Segment], begun: str
) -> tuple[ReasoningTags | None, str]:
    """The tags of the reasoning that a prompt ends in, and the begun answer's part of it."""
    tags = tags_at_start(begun)
    if tags == THINK_TAGS and writes_channels(template.source):
        is_open = tags.close not in begun
        return (CHANNELS, begun.removeprefix(tags.open).lstrip()) if is_open else (None, "")
    if tags is not None:
        reasoned = begun.lstrip().removeprefix(tags.open)
    else:
        before = list(segments)
        while begun and before and not before[-1].is_markup:
            del before[-1]
        tags, reasoned = tags_at_start(_opening(before)), begun
    if tags is None or tags.close in begun:
        return None, ""
    return tags, reasoned


def _joined(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)
