"""Where in an answer to a conversation a grammar holds: after the model has reasoned."""

from __future__ import annotations

import re

from localkv.loader.answer_tags import REASONING_TAGS, channel_markers
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.tokenizer import Tokenizer
from localkv.structured.grammar import Grammar
from localkv.structured.scope import EVERYWHERE, Scope, text_pattern

FINAL = re.compile(rb"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
"""What begins the answer proper where a model writes channels."""
_LAST = 64
"""Tokens at the end of a prompt in which the end of reasoning is looked for."""


def answer_scope(grammar: Grammar, prompt: ChatPrompt, tokenizer: Tokenizer) -> Scope:
    """Where a grammar holds that the answer to a prompt has to keep to.

    A prompt that ends within the reasoning leaves that free. Else the model may begin with the tag
    that opens one, if that is a token of it, or with what the grammar allows.
    """
    mark = text_pattern(grammar.after) if grammar.after else None
    if grammar.is_all:
        return EVERYWHERE
    last = last_of(prompt, tokenizer)
    if channel_markers(tokenizer):
        is_final = FINAL.search(last.rpartition("<|start|>")[2].encode()) is not None
        return Scope(before=None if is_final else FINAL, mark=mark)
    if prompt.reasoning is not None:
        close = text_pattern(prompt.reasoning.close)
        return Scope(before=close, mark=mark, skips_space=True)
    closes = tuple(tags.close for tags in REASONING_TAGS)
    if prompt.is_begun or last.rstrip().endswith(closes):
        return Scope(mark=mark)
    openings = {}
    for tags in REASONING_TAGS:
        token = tokenizer.token_to_id(tags.open)
        if token is not None:
            openings[token] = text_pattern(tags.close)
    return Scope(openings=openings, mark=mark, skips_space=True)


def last_of(prompt: ChatPrompt, tokenizer: Tokenizer) -> str:
    """The text at the end of a prompt."""
    return tokenizer.decode(prompt.ids[-_LAST:])
