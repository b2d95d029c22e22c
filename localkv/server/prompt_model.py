"""The part of a model that needs no weights: its tokenizer and its chat templates.

The front has it, so that prompts are checked and counted while the engine computes, or loads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from localkv.engine.text_model import TextModel
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.chat_template import ChatTemplate
from localkv.loader.gguf_file import open_gguf
from localkv.loader.template_process import start_ahead
from localkv.structured.grammar import Grammar
from localkv.tool_calls.bare_json import GENERIC
from localkv.tool_calls.call_grammar import call_grammar
from localkv.tool_calls.detection import family_of
from localkv.tool_calls.family import Family
from localkv.tool_calls.tools import Tools


class PromptModel(TextModel):
    """Turns requests into tokens.

    Args:
        path: the model's file.
        override_pre: use this pre-tokenizer instead of the file's.
        chat_template: a Jinja template instead of the file's own.

    Raises:
        ModelFileError: the file can't be used, or has no tokenizer that is supported.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        override_pre: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        start_ahead()
        self.gguf = open_gguf(path)
        self._override_pre = override_pre
        self.tokenizer  # noqa: B018  # built now, so that no request waits for it
        self._own = None if chat_template is None else self.chat_template_from(chat_template)

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
    ) -> tuple[Family, Tools, Grammar | None]:
        """How the model writes calls, the tools that it may call, and what its answer keeps to.

        Raises:
            UsageError: a tool is none, or not there, or no grammar is for what is required.
        """
        known = Tools(tools, choice, parallel=parallel)
        template = self._own or self.tool_template
        if template is None or not known:
            return GENERIC, known, None
        family = family_of(template)
        return family, known, call_grammar(family, known, self.tokenizer)

    def conversation(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """A conversation as the model reads it. `TextModel.chat_prompt` describes the arguments.

        Raises:
            ChatTemplateError: the template fails on this conversation, or refuses it.
            UsageError: there is no template, a message is not one, or arguments contradict others.
        """
        return self.chat_prompt(messages, template=self._own, **options)
