"""Facts that llama.cpp knows better than files: which tokens end a turn, and types of tokens.

Follows `llama_vocab::impl::load` of llama.cpp (`src/llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from localkv.loader.token_types import BYTE_TEXTS, SPACE, TokenType

if TYPE_CHECKING:
    from localkv.loader.metadata import Metadata

# A token with one of these texts ends a turn or a document, despite its type in the file.
_EOG_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
# Fill-in-the-middle tokens that end a file: the key that names one, or else its text.
_EOG_FIM = (
    ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep_token_id", ("<|file_sep|>",)),
)
# The other fill-in-the-middle tokens, which are control tokens even if the file says otherwise.
_FIM = (
    (
        ("fim_pre_token_id", "prefix_token_id"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
        "<|prefix|>",
    ),
    (
        ("fim_suf_token_id", "suffix_token_id"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> "
        "<|suffix|>",
    ),
    (
        ("fim_mid_token_id", "middle_token_id"),
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> "
        "<|middle|>",
    ),
)
# gpt-oss's channel markup. A text without it is hard to understand, so it is part of the text. (In
# llama.cpp these become tokens of the kind that users can write, too.)
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_SHOWN_END = "<|end|>"


def special_id(metadata: Metadata, name: str, default: int | None, n_vocab: int) -> int | None:
    """The id that a key of `tokenizer.ggml` names, or else the default, if it is a token's."""
    for token in (metadata.integer(f"tokenizer.ggml.{name}", None), default):
        if token is not None and 0 <= token < n_vocab:
            return token
    return None


def correct_spm_types(tokens: list[str], types: list[int], ids: dict[str, int]) -> None:
    """Set the types by which tokens stand for text, so that decoding undoes encoding."""
    for text in BYTE_TEXTS:
        token = ids.get(text)
        if token is not None and types[token] == TokenType.NORMAL:
            types[token] = TokenType.BYTE
    for token, token_type in enumerate(types):
        # Written with an escaped space it can't be found in a text, it can only be merged.
        if token_type == TokenType.USER_DEFINED and SPACE in tokens[token]:
            types[token] = TokenType.NORMAL


def correct_types(
    metadata: Metadata, tokens: list[str], types: list[int], ids: dict[str, int], eos_id: int | None
) -> frozenset[int]:
    """Set the types that files are known to get wrong, in place.

    Returns:
        the tokens that end a generation.
    """
    n_vocab = len(tokens)
    eog: set[int] = set()

    def first(keys: tuple[str, ...], texts: tuple[str, ...]) -> int | None:
        """The id that a key names, or else that of the first text that is there: then control."""
        for key in keys:
            if (token := special_id(metadata, key, None, n_vocab)) is not None:
                return token
        for text in texts:
            if text in ids:
                types[ids[text]] = TokenType.CONTROL
                return ids[text]
        return None

    for keys, texts in _FIM:
        first(keys, tuple(texts.split()))
    found = [first((key,), texts) for key, texts in _EOG_FIM]
    for text in _EOG_TEXTS:
        if text in ids:
            eog.add(ids[text])
            types[ids[text]] = TokenType.CONTROL
    for text in _SHOWN_TEXTS:
        if text in ids:
            types[ids[text]] = TokenType.CONTROL
    found += [first((key,), ()) for key in ("eot_token_id", "eom_token_id")]
    eog.update(token for token in [*found, eos_id] if token is not None)
    texts_of_eog = {tokens[token] for token in eog}
    # In gpt-oss and Solar, <|end|> ends a channel and not the turn.
    if {"<|return|>", "<|call|>"} <= texts_of_eog or (
        "<|flush|>" in texts_of_eog and texts_of_eog & {"<|call|>", "<|calls|>"}
    ):
        eog.discard(ids.get(_SHOWN_END, -1))
    # In Gemma 4 and PLaMo, </s> is text.
    if texts_of_eog & {"<|tool_response>", "<|plamo:eos|>"}:
        token = ids.get("</s>")
        if token in eog:
            eog.discard(token)
            types[token] = TokenType.NORMAL
    return frozenset(eog)


def shown_ids(ids: dict[str, int], eog_ids: Container[int]) -> frozenset[int]:
    """The control tokens that are part of a text nevertheless."""
    shown = [ids[text] for text in _SHOWN_TEXTS if text in ids]
    end = ids.get(_SHOWN_END)
    if shown and end is not None and end not in eog_ids:
        shown.append(end)
    return frozenset(shown)
