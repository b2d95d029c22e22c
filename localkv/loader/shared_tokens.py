"""Whether two model files have the same tokens, as a draft and its model must."""

from __future__ import annotations

from localkv.errors import UsageError, printable
from localkv.loader.model_header import ModelHeader

MOST_MORE = 128
"""Tokens that one of them may have besides, at the end: files pad their vocabularies."""


def shared_tokens(model: ModelHeader, draft: ModelHeader) -> int:
    """How many tokens both have, under the same ids.

    Raises:
        UsageError: they are not the same.
    """
    kinds = [header.metadata.string("tokenizer.ggml.model", "") for header in (model, draft)]
    tokens = [header.metadata.strings("tokenizer.ggml.tokens", []) for header in (model, draft)]
    n = min(map(len, tokens))
    pairs = zip(*tokens, strict=False)
    differ = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    found = None
    if kinds[0] != kinds[1]:
        found = f"its tokenizer is {kinds[1] or 'none'}, not {kinds[0] or 'none'}"
    elif differ is not None:
        found = f"token {differ} is {tokens[1][differ]!r} there, and {tokens[0][differ]!r} here"
    elif abs(len(tokens[0]) - len(tokens[1])) > MOST_MORE or not n:
        found = f"it has {len(tokens[1])} tokens, the model {len(tokens[0])}"
    if found is not None:
        raise UsageError(
            f"{printable(draft.path.name)} can't draft for {printable(model.path.name)}: {found}",
            hint="a draft has the tokenizer of its model; smaller models of the same family do",
        )
    return n
