"""Prompts: conversations and texts become the tokens that the engine reads.

This needs a tokenizer and chat templates, and no weights. The front has them, so that prompts are
checked and counted while the engine computes, or loads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from localkv.config import Overrides
from localkv.engine.tokenized_model import TokenizedModel
from localkv.loader.answer_tags import PRESERVE
from localkv.loader.chat_prompt import EFFORT, ChatPrompt
from localkv.loader.chat_template import THINK, ChatTemplate
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import with_overrides
from localkv.loader.template_process import start_ahead
from localkv.server.failures import RequestError, context_error, unsupported
from localkv.server.limits import MOST_PROMPTS, Object, TextParts
from localkv.structured.grammar import Grammar
from localkv.tool_calls.call_grammar import call_grammar
from localkv.tool_calls.detection import family_of
from localkv.tool_calls.family import Family
from localkv.tool_calls.json_object import GENERIC
from localkv.tool_calls.tools import Tools

if TYPE_CHECKING:
    from localkv.server.front import Front

MOST_COUNTED = 2 << 20
"""Most characters of a text whose tokens are only counted."""


GivenPrompts: TypeAlias = str | TextParts | Object
"""The field `prompt`, as OpenAI's API and llama-server's take it."""


class PromptModel(TokenizedModel):
    """Turns requests into tokens.

    Args:
        path: the model's file.
        overrides: what options put in the place of what it says.
        chat_template: a Jinja template instead of the file's own.
        reasoning: whether the model reasons where a request says nothing, one of `REASONING`.
        reasoning_budget: most tokens of it, where a request says nothing; -1 sets no limit.
        reasoning_effort: how much it reasons, where a request says nothing; one of `EFFORTS`.
        preserve_reasoning: whether the reasoning of earlier answers is kept, where a request says
            nothing and the template has a switch for that; None keeps it.

    Attributes:
        warnings: one line for each argument that has no effect.

    Raises:
        ModelFileError: the file can't be used, or has no tokenizer that is supported.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        overrides: Overrides | None = None,
        *,
        chat_template: str | None = None,
        reasoning: str = "auto",
        reasoning_budget: int = -1,
        reasoning_effort: str | None = None,
        preserve_reasoning: bool | None = None,
    ) -> None:
        start_ahead()
        self.gguf = with_overrides(open_gguf(path), overrides or Overrides())
        self.tokenizer.least_tokens("")  # built now, so that no request waits for it
        self._own = None if chat_template is None else self.chat_template_from(chat_template)
        self._reasoning, self._reasoning_budget = reasoning, reasoning_budget
        self._effort, self._preserve = reasoning_effort, preserve_reasoning
        template = self.template
        self.warnings = list[str]()
        if reasoning != "auto" and template is not None and template.think_switch is None:
            self.warnings.append(
                f"--reasoning {reasoning} has no effect: the chat template has no switch for it"
                + (" (--reasoning-budget 0 ends it at once)" if reasoning == "off" else "")
            )

        if preserve_reasoning is not None and not (template and template.preserving(True)):
            flag = "--reasoning-preserve" if preserve_reasoning else "--no-reasoning-preserve"
            self.warnings.append(f"{flag} has no effect: the chat template has no switch for it")
            self._preserve = None

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
        self, messages: Sequence[Mapping[str, Any]], *, most: int | None = None, **options: Any
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
        if self._preserve is not None:
            given = options.get("template_kwargs") or {}
            options["template_kwargs"] = {PRESERVE: self._preserve, **given}
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


class TextPrompt(NamedTuple):
    """What a text goes on from.

    Attributes:
        ids: its tokens.
        text: the same as it was given, or without control tokens.
    """

    ids: list[int]
    text: str


async def text_prompts(front: Front, given: GivenPrompts) -> list[TextPrompt]:
    """The prompts of a request.

    Args:
        given: "text"; [1, 2]; [1, "text", 2]; {"prompt_string": "text"}; or a list of such, in
            which a number is never alone.

    Raises:
        RequestError: it is none of these, or a prompt is empty.
    """
    model = await front.model()
    many = _split(given)
    front.check_count(len(many))
    most = front.facts.engine.n_ctx
    return await front.in_thread(lambda: [_prompt(model, one, most) for one in many])


def _split(given: GivenPrompts) -> list[Any]:
    if not isinstance(given, list) or any(_is_token(item) for item in given):
        return [given]
    if not given:
        raise RequestError(400, "prompt is empty", "send a text, or token ids")
    if len(given) > MOST_PROMPTS:
        raise RequestError(400, f"prompt must be up to {MOST_PROMPTS} prompts, not {len(given)}")
    return given


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _prompt(model: PromptModel, given: object, most: int) -> TextPrompt:
    if isinstance(given, dict):
        given = text_of(given)
    parts = given if isinstance(given, list) else [given]
    ids = list[int]()
    for number, part in enumerate(parts):
        if isinstance(part, str):
            special = number == 0
            ids += model.tokens(part, add_special=special, parse_special=True, most=most)
        elif _is_token(part):
            ids.append(checked_token(model, part))
        else:
            raise RequestError(
                400,
                f"prompt: {part!r:.60} is neither a text nor a token id",
                'as in "text", [1, 2] or ["one text", "another"]',
            )
        if len(ids) > most:
            raise context_error(len(ids), most, is_least=True)
    if not ids:
        raise RequestError(400, "the prompt has no tokens", "send a text, or token ids")
    text = given if isinstance(given, str) else model.tokenizer.decode(ids, skip_special=True)
    return TextPrompt(ids, text)


async def infill_prompt(
    front: Front,
    prefix: str,
    suffix: str,
    *,
    extra: Sequence[tuple[str, str]] = (),
    prompt: str = "",
    max_tokens: int | None,
) -> TextPrompt:
    """The prompt for the text between a prefix and a suffix (`TokenizedModel.infill_prompt`).

    Raises:
        RequestError: the model has no tokens for it, or a text is too long to be read.
    """
    model = await front.model()
    if missing := model.tokenizer.fim.missing:
        raise unsupported(
            f"filling in the middle (no {' and no '.join(missing)} token)",
            "serve a model for code that can, such as Qwen2.5-Coder",
        )

    def made() -> TextPrompt:
        for text in (prefix, suffix, prompt, *(part for file in extra for part in file)):
            model.check_length(text)
        ids = model.infill_prompt(
            prefix,
            suffix,
            extra=extra,
            prompt=prompt,
            n_ctx=front.facts.engine.n_ctx,
            max_tokens=max_tokens,
            suffix_first=front.settings.spm_infill,
        )
        return TextPrompt(ids, prefix + prompt)

    return await front.in_thread(made)


def checked_token(model: PromptModel, token: Any) -> int:
    """A token id.

    Raises:
        RequestError: the vocabulary has no such token.
    """
    n_vocab = model.tokenizer.n_vocab
    if not _is_token(token) or not 0 <= token < n_vocab:
        raise RequestError(
            400, f"{token!r:.40} is no token id", f"the vocabulary has 0 to {n_vocab - 1}"
        )
    checked: int = token
    return checked


def text_of(part: dict[str, Any]) -> str:
    """The text of an object, as llama-server takes them: {"prompt_string": "text"}, or
    {"content": [{"type": "text", "text": "text"}]}, whose parts are joined.

    Raises:
        RequestError: it has no text, or an image, audio or video.
    """
    if part.get("multimodal_data"):
        raise unsupported("multimodal_data", "this model reads text")
    content = part.get("content")
    texts: list[Any] = (
        content if isinstance(content, list) else [{"text": part.get("prompt_string")}]
    )
    for one in texts:
        kind = one.get("type", "text") if isinstance(one, dict) else None
        if kind in ("image_url", "input_audio", "input_video"):
            raise unsupported(kind, "this model reads text")
        if kind != "text" or not isinstance(one.get("text"), str):
            raise RequestError(
                400,
                "an object has no text",
                'as in {"prompt_string": "a"} or {"content": [{"type": "text", "text": "a"}]}',
            )
    return "".join(one["text"] for one in texts)
