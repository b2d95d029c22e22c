"""The part of a model that needs no weights: its tokenizer and its chat templates.

The front has it, so that prompts are checked and counted while the engine computes, or loads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from localkv.engine.tokenized_model import TokenizedModel
from localkv.loader.chat_prompt import EFFORT, ChatPrompt
from localkv.loader.chat_template import THINK, ChatTemplate
from localkv.loader.gguf_file import open_gguf
from localkv.loader.template_process import start_ahead
from localkv.server.failures import RequestError, context_error
from localkv.structured.grammar import Grammar
from localkv.tool_calls.call_grammar import call_grammar
from localkv.tool_calls.detection import family_of
from localkv.tool_calls.family import Family
from localkv.tool_calls.json_call import GENERIC
from localkv.tool_calls.tools import Tools

MOST_COUNTED = 2 << 20
"""Most characters of a text whose tokens are only counted."""


class PromptModel(TokenizedModel):
    """Turns requests into tokens.

    Args:
        path: the model's file.
        override_pre: use this pre-tokenizer instead of the file's.
        chat_template: a Jinja template instead of the file's own.
        reasoning: whether the model reasons where a request says nothing, one of `REASONING`.
        reasoning_budget: most tokens of it, where a request says nothing; -1 sets no limit.
        reasoning_effort: how much it reasons, where a request says nothing; one of `EFFORTS`.

    Attributes:
        warnings: one line for each argument that has no effect.

    Raises:
        ModelFileError: the file can't be used, or has no tokenizer that is supported.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        override_pre: str | None = None,
        chat_template: str | None = None,
        reasoning: str = "auto",
        reasoning_budget: int = -1,
        reasoning_effort: str | None = None,
    ) -> None:
        start_ahead()
        self.gguf = open_gguf(path)
        self._override_pre = override_pre
        self.tokenizer.least_tokens("")  # built now, so that no request waits for it
        self._own = None if chat_template is None else self.chat_template_from(chat_template)
        self._reasoning, self._reasoning_budget = reasoning, reasoning_budget
        self._effort = reasoning_effort
        template = self.template
        self.warnings = list[str]()
        if reasoning != "auto" and template is not None and template.think_switch is None:
            self.warnings.append(
                f"--reasoning {reasoning} has no effect: the chat template has no switch for it"
                + (" (--reasoning-budget 0 ends it at once)" if reasoning == "off" else "")
            )

    @property
    def template(self) -> ChatTemplate | None:
        """What conversations are rendered with, if there is anything."""
        return self._own or self.chat_template

    def calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        choice: str | Mapping[str, Any],
        *,
        parallel: bool,
        answer: Grammar | None,
    ) -> tuple[Family, Tools, Grammar | None]:
        """How the model writes calls, the tools that it may call, and what its answer keeps to.

        Args:
            answer: what it keeps to without calls.

        Raises:
            UsageError: a tool is none, or not there, or no grammar is for what is required.
        """
        known = Tools(tools, choice, parallel=parallel)
        template = self._own or self.tool_template
        if template is None or not known:
            return GENERIC, known, answer
        family = family_of(template)
        return family, known, call_grammar(family, known, self.tokenizer, answer)

    def tokens(
        self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None
    ) -> list[int]:
        """Token ids of a text.

        Raises:
            RequestError: as `check_length`.
        """
        self.check_length(text, most)
        return self.tokenize(text, add_special, parse_special)

    def check_length(self, text: str, most: int | None = None) -> None:
        """Refuse a text that is too long, before it is cut into tokens.

        Args:
            most: tokens that there is room for; None where they are only counted.

        Raises:
            RequestError: it has more tokens than `most`, even if each were the longest one; or,
                without `most`, more than `MOST_COUNTED` characters.
        """
        if most is not None:
            least = self.tokenizer.least_tokens(text)
            if least > most:
                raise context_error(least, most, is_least=True)
        elif len(text) > MOST_COUNTED:
            raise RequestError(
                400, f"the text has {len(text):,} characters; up to {MOST_COUNTED:,} are possible"
            )

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        most: int | None = None,
        **options: Any,
    ) -> ChatPrompt:
        """A conversation as the model reads it. `TextModel.chat_prompt` describes the arguments.

        Args:
            most: tokens that there is room for; None where they are only counted.

        Raises:
            RequestError: as `check_length`.
            ChatTemplateError: the template fails on this conversation, or refuses it.
            UsageError: there is no template, a message is not one, or arguments contradict others.
        """
        if options.get("reasoning_budget") is None and self._reasoning_budget >= 0:
            options["reasoning_budget"] = self._reasoning_budget
        if options.get("reasoning_effort") is None:
            options["reasoning_effort"] = self._effort_for(options)
        if options.get("enable_thinking") is None and options["reasoning_effort"] != "none":
            options["enable_thinking"] = self._thinks(options)
        check = partial(self.check_length, most=most)
        return self.chat_prompt(messages, template=self._own, check=check, **options)

    def _effort_for(self, options: Mapping[str, Any]) -> str | None:
        """How much the model reasons, for a request that says neither how much nor whether."""
        variables = {THINK, EFFORT} & set(options.get("template_kwargs") or {})
        says_whether = options.get("enable_thinking") is not None or bool(variables)
        return None if self._effort == "none" and says_whether else self._effort

    def _thinks(self, options: Mapping[str, Any]) -> bool | None:
        """What the switch for reasoning is set to, where a request does not; None leaves it."""
        template = self._own or (self.tool_template if options.get("tools") else self.chat_template)
        switch = None if template is None else template.think_switch
        variables = options.get("template_kwargs") or {}
        if switch is None or {switch, THINK} & set(variables):
            return None
        if self._reasoning != "auto":
            return self._reasoning == "on"
        is_ended = options.get("reasoning_budget") == 0
        return True if switch == THINK and not is_ended else None
