"""`TokenizedModel`: the part of a model that needs no weights, its prompts and options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Unpack

from localkv.errors import UsageError
from localkv.loader.answer_tags import CALL_MARKERS, REASONING_TAGS
from localkv.loader.chat_prompt import ChatPrompt, chat_prompt
from localkv.loader.chat_template import (
    ChatTemplate,
    chat_template_from_metadata,
    chat_template_names,
    has_chat_template,
)
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from localkv.option_checks import check_types

if TYPE_CHECKING:
    from localkv.structured.constraint import GrammarTokens
from collections.abc import Iterable
from threading import Event
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, TypeGuard

from localkv.sampling.params import SamplingOptions, SamplingParams

if TYPE_CHECKING:
    from localkv.structured.grammar import Grammar, Schema


INFILL_TOKENS = 2048
"""Most tokens of a text around a gap: llama-server's batch."""
LEAST_ANSWER = 256
"""Tokens that fill a gap, for which other files leave room at least. Editors ask for as many. So a
request that only fills the cache (`n_predict` 0) leaves the same files."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""What stands before each file where the vocabulary has no token for that."""

RERANK_TEMPLATE = "tokenizer.chat_template.rerank"
TOOL_USE = "tool_use"
"""The name of a second chat template, for tools, as transformers knows it."""


class TokenizedModel:
    """The tokenizer and the chat templates of a file: from texts and conversations to token ids,
    and back.

    Attributes:
        gguf: the file.
    """

    gguf: GGUFFile

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises:
            ModelFileError: the file has none, or none that is supported.
        """
        return tokenizer_from_metadata(self.gguf.metadata)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, or None."""
        return chat_template_from_metadata(self.gguf.metadata)

    @property
    def has_chat_template(self) -> bool:
        """Whether the file has a chat template, working or not."""
        return has_chat_template(self.gguf.metadata)

    @cached_property
    def tool_template(self) -> ChatTemplate | None:
        """The file's chat template where there are tools; usually the same one."""
        if TOOL_USE not in chat_template_names(self.gguf.metadata):
            return self.chat_template
        return chat_template_from_metadata(self.gguf.metadata, TOOL_USE)

    @cached_property
    def _kept_ids(self) -> frozenset[int]:
        """The control tokens around reasoning and calls of tools: part of an answer's text."""
        tokenizer = self.tokenizer
        tags = [tag for pair in (*REASONING_TAGS, CALL_MARKERS) for tag in pair]
        found = [(token, tag) for tag in tags for token in tokenizer.special_tokens(tag)]
        return frozenset(
            token
            for token, tag in found
            if tokenizer.is_control(token) and tokenizer.id_to_token(token) in tag
        )

    @cached_property
    def grammar_tokens(self) -> GrammarTokens:
        """What grammars know of the vocabulary: made with the first of them, which takes a second
        for 100,000 tokens, or by `grammar_tokens.begin()` in a thread of its own."""
        from localkv.structured.constraint import GrammarTokens

        return GrammarTokens(self.tokenizer)

    def chat_template_from(self, source: str) -> ChatTemplate:
        """A Jinja template with this model's BOS and EOS, to use instead of the file's own."""
        bos, eos = (
            "" if token is None else self.tokenizer.id_to_token(token)
            for token in (self.tokenizer.bos_id, self.tokenizer.eos_id)
        )
        return ChatTemplate(source, bos_token=bos, eos_token=eos)

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text; `parse_special` lets control tokens be written in it."""
        check_types(TokenizedModel.tokenize, locals())
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def pair_ids(self, query: str, document: str) -> list[int]:
        """Token ids of a query and a document that are scored together (`LLM.rerank`).

        A file may have a text that both are put into, `tokenizer.chat_template.rerank`, with
        `{query}` and `{document}`; control tokens are read in that text only.
        """
        check_types(TokenizedModel.pair_ids, locals())
        template = self.gguf.metadata.string(RERANK_TEMPLATE, None)
        if template is None:
            return self.tokenizer.encode_pair(query, document)
        given = {"{query}": query, "{document}": document}
        parts = re.split(r"(\{query\}|\{document\})", template)
        segments = [(given.get(part, part), part not in given) for part in parts]
        return self.tokenizer.encode_segments(segments, add_special=False)

    def infill_prompt(
        self,
        prefix: str,
        suffix: str,
        *,
        extra: Sequence[tuple[str, str]] = (),
        prompt: str = "",
        n_ctx: int,
        max_tokens: int | None = None,
        suffix_first: bool = False,
    ) -> list[int]:
        """Token ids that ask for the text between `prefix` and `suffix`.

        They are llama-server's (`format_prompt_infill`): a repository's name and its files, if
        there are tokens for these, then the prefix, the suffix and the token that asks for the
        middle. Of prefix and suffix the ends at the gap are kept, 3/4 and 1/4 of `INFILL_TOKENS`,
        or of 3/4 of a context that is smaller. What is left of the context, less twice
        `max_tokens`, is for the end of `extra`.

        Args:
            prefix, suffix: the text before the gap and after it. Control tokens in them are text.
            extra: names and texts of other files, the most important last.
            prompt: goes on with the prefix, and is never cut; control tokens are read in it.
            n_ctx: tokens of the context.
            max_tokens: that may fill the gap; `LEAST_ANSWER` at least.
            suffix_first: the suffix comes before the prefix, as some models want it.

        Raises:
            UsageError: the model has no tokens for this.
        """
        check_types(TokenizedModel.infill_prompt, locals())
        tokenizer, fim = self.tokenizer, self.tokenizer.fim
        if fim.prefix is None or fim.suffix is None or fim.middle is None:
            missing = " and no ".join(fim.missing)
            raise UsageError(
                f"the model can't fill in the middle: it has no {missing} token",
                hint="use a model for code that can, such as Qwen2.5-Coder",
            )

        def tokens(text: str, *, parse_special: bool = False) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=parse_special)

        files = list[int]()
        if fim.repository is not None:
            files += [fim.repository, *tokens("myproject\n")]
        for name, text in extra:
            begins = tokens(SNIPPET) if fim.file is None else [fim.file, *tokens(f"{name}\n")]
            files += [*begins, *tokens(text)]
        if fim.file is not None:
            files += [fim.file, *tokens("filename\n")]
        n_around = min(INFILL_TOKENS, n_ctx * 3 // 4)
        going_on = tokens(prompt, parse_special=True)
        n_suffix = max(0, n_around // 4 - 2 - len(going_on))
        n_files = max(0, n_ctx - n_around - 2 * max(LEAST_ANSWER, max_tokens or 0))
        before = [fim.prefix, *_last(tokens(prefix), 3 * (n_around // 4)), *going_on]
        after = [fim.suffix, *tokens(suffix)[:n_suffix]]
        bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
        around = [*after, *before] if suffix_first else [*before, *after]
        return [*_last(files, n_files), *bos, *around, fim.middle]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        check_types(TokenizedModel.detokenize, locals())
        return self.tokenizer.decode(ids)

    def chat_prompt(
        self,
        messages: str | Sequence[Mapping[str, object]],
        *,
        template: ChatTemplate | None = None,
        check: Callable[[str], None] | None = None,
        **options: Unpack[PromptOptions],
    ) -> ChatPrompt:
        """A conversation as the model reads it, for `stream` and `complete`.

        Takes the arguments of `chat` that are about the prompt, and `continued`: the text that the
        model has written as its answer so far, with its reasoning. The prompt goes on with exactly
        this, and the stream has what is new.

        Args:
            check: raises if the rendered text is too long to be turned into tokens.

        Returns:
            the prompt; its `warnings` name the arguments that have no effect with this template.
        """
        check_types(TokenizedModel.chat_prompt, locals())
        check_types(PromptOptions, options)
        template = template or (self.tool_template if options.get("tools") else self.chat_template)
        if template is None:
            raise UsageError(
                "the model has no chat template",
                hint="--chat-template NAME (template= in Python) gives one; without --chat, "
                "complete goes on with plain text",
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return chat_prompt(self.tokenizer, template, messages, check=check, **options)

    def _ids(self, prompt: Prompt, parse_special: bool) -> list[int]:
        """The tokens of a prompt."""
        check_types(TokenizedModel._ids, locals())
        if isinstance(prompt, ChatPrompt):
            return prompt.ids
        if isinstance(prompt, str):
            return self.tokenize(prompt, parse_special=parse_special)
        return list(prompt)

    def _token_text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token, special=True).decode("utf-8", errors="replace")


def _last(ids: list[int], n: int) -> list[int]:
    return ids[max(0, len(ids) - n) :]


Text: TypeAlias = str | Sequence[int]
"""A string, or token ids that are taken as they are."""

Prompt: TypeAlias = Text | ChatPrompt
Texts: TypeAlias = list[str] | list[list[int]]
Prompts: TypeAlias = Texts | list[ChatPrompt]


def are_many(prompts: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether it is a list of prompts. An empty list is a prompt without tokens."""
    if isinstance(prompts, str | ChatPrompt) or not isinstance(prompts, Sequence) or not prompts:
        return False
    return _is_prompt(prompts[0])


def listed(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The prompts of a list, or of anything else that yields them.

    Raises:
        UsageError: it is one prompt.
    """
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | ChatPrompt)
    every = [*prompts] if is_list else []
    if not is_list or not all(map(_is_prompt, every)):
        raise UsageError(
            "this is one prompt, and not a list of them", hint="complete continues one prompt"
        )
    return every


def _is_prompt(one: object) -> bool:
    """Whether it is a prompt, and not a token of one."""
    return isinstance(one, str | ChatPrompt) or hasattr(one, "__len__")


class PromptOptions(TypedDict, total=False):
    """The arguments of `LLM.chat_prompt`; `LLM.chat` describes them."""

    tools: Sequence[Mapping[str, object]] | None
    template_kwargs: Mapping[str, object] | None
    enable_thinking: bool | None
    reasoning_budget: int | None
    reasoning_effort: str | None
    preserve_reasoning: bool | None
    prefill: str
    continued: str
    continue_final_message: bool | str
    add_generation_prompt: bool | None


class ChatOptions(SamplingOptions, total=False):
    """The arguments of `LLM.chat` that are about its answer; `LLM.stream` describes them."""

    max_tokens: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    audit: bool | Literal["exact"]
    schema: Schema | None
    grammar: Grammar | str | None
    spec: str | None
    lora: Mapping[int, float] | None
    cancel: Event | None
    params: SamplingParams | None


class StreamOptions(ChatOptions, total=False):
    """The arguments of `LLM.stream`, which describes them."""

    parse_special: bool
