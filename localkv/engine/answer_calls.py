"""What a request that has tools asks of an answer, and the calls in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from localkv.loader.answer_tags import CHANNELS, REASONING_TAGS, THINK_TAGS, tags_at_start
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.tokenizer import Tokenizer
from localkv.structured.grammar import Grammar, grammar_of
from localkv.tool_calls.call_grammar import call_grammar
from localkv.tool_calls.detection import family_of
from localkv.tool_calls.family import CallReader
from localkv.tool_calls.source import ToolCall, gathered
from localkv.tool_calls.tools import Tools


class AnswerCalls:
    """The tools of one request, in the syntax of the model's family.

    Args:
        template: the model's.
        described: the tools, as `LLM.chat` takes them.
        choice, parallel: as `LLM.chat` takes them.

    Raises:
        UsageError: a tool is not one, or the chosen one is not there.
    """

    def __init__(
        self,
        template: ChatTemplate,
        described: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any],
        *,
        parallel: bool,
    ) -> None:
        self.tools = Tools(described, choice, parallel=parallel)
        self.family = family_of(template)

    def grammar(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> Grammar | None:
        """What the answer has to keep to, if anything.

        Args:
            options: of the request, which may say what an answer without calls has to be.

        Raises:
            UsageError: there is no grammar for it, or for calls that need one.
        """
        answer = grammar_of(options.get("schema"), options.get("grammar"))
        return call_grammar(self.family, self.tools, tokenizer, answer)

    def in_answer(self, prompt: ChatPrompt) -> ReadCalls:
        """What looks for the calls in the answer to a prompt."""
        return ReadCalls(self, prompt)

    def read(
        self, text: str, prompt: ChatPrompt, *, is_cut: bool = False
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """An answer without reasoning and calls, and its calls.

        Args:
            text: of the stream that answers the prompt.
            is_cut: the text was cut, so the beginning of a tag or of a call is left out.
        """
        if prompt.reasoning is not None and not prompt.opening:
            tags = THINK_TAGS if prompt.reasoning == CHANNELS else prompt.reasoning
            text = tags.open + text
        reader = CallReader(self.family, self.tools)
        start = text.lstrip()
        if is_cut and start and any(tags.open.startswith(start) for tags in REASONING_TAGS):
            text = ""
        return gathered([*reader.push(_answer(text)), *reader.end(is_cut=is_cut)])


class ReadCalls:
    """The calls in one answer, looked for once: their ids are made then.

    Args:
        calls: looks for them.
        prompt: which the answer follows.
    """

    def __init__(self, calls: AnswerCalls, prompt: ChatPrompt) -> None:
        self._calls = calls
        self._prompt = prompt
        self._text, self._is_cut = "", False

    def of(self, text: str, *, is_cut: bool) -> tuple[str, tuple[ToolCall, ...]]:
        """The content and the calls of the whole answer."""
        self._text, self._is_cut = text, is_cut
        return self._found

    @cached_property
    def _found(self) -> tuple[str, tuple[ToolCall, ...]]:
        return self._calls.read(self._text, self._prompt, is_cut=self._is_cut)


def _answer(text: str) -> str:
    """A text without the reasoning that it begins with."""
    tags = tags_at_start(text)
    if tags is None:
        return text
    _, _, answer = text.partition(tags.close)
    return answer.lstrip("\n")
