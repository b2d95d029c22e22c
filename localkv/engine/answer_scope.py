"""Where in an answer to a conversation a grammar holds: after the model has reasoned."""

from __future__ import annotations

import re

from localkv.loader.channels import channel_markers
from localkv.loader.chat_prompt import ChatPrompt
from localkv.loader.reasoning_tags import REASONING_TAGS
from localkv.loader.tokenizer import Tokenizer
from localkv.structured.scope import EVERYWHERE, Scope, mark

_FINAL = re.compile(rb"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
"""What begins the answer proper where a model writes channels."""


def answer_scope(prompt: ChatPrompt, tokenizer: Tokenizer) -> Scope:
    """Where a grammar holds that the answer to a prompt has to keep to.

    A prompt that ends within the reasoning leaves that free. Else the model may begin with the tag
    that opens one, if that is a token of it, or with what the grammar allows.
    """
    if channel_markers(tokenizer):
        last = prompt.text.rpartition("<|start|>")[2]
        return EVERYWHERE if _FINAL.search(last.encode()) else Scope(after=_FINAL)
    if prompt.reasoning is not None:
        return Scope(after=mark(prompt.reasoning.close), skips_space=True)
    if prompt.is_begun or prompt.text.rstrip().endswith(tuple(t.close for t in REASONING_TAGS)):
        return EVERYWHERE
    openings = {}
    for tags in REASONING_TAGS:
        token = tokenizer.token_to_id(tags.open)
        if token is not None:
            openings[token] = mark(tags.close)
    return Scope(openings=openings, skips_space=True)
