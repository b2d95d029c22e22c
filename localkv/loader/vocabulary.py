"""A GGUF file's facts about its tokens: texts, types, special ids, end of generation.

Follows `llama_vocab::impl::load` of llama.cpp (`src/llama-vocab.cpp`), corrections of wrong files
included: which tokens end a turn, and types of tokens. This file knows nothing about splitting or
merging text.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from localkv.config import PRE
from localkv.errors import ModelFileError, UsageError
from localkv.loader.pre_tokenizers import PRE_TOKENIZERS
from localkv.option_checks import unknown_name

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from localkv.loader.gguf_header import Strings
    from localkv.loader.metadata import Metadata
    from localkv.loader.token_texts import MergeTexts, TokenTexts


SPACE = "▁"
"""SentencePiece's character for a space."""

BYTE_TEXTS = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""SentencePiece's tokens for single bytes."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = frozenset((TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN))
"""Types of tokens that are matched in a text as a whole, before anything is merged."""


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
_KNOWN_TEXTS = frozenset(
    (
        *_EOG_TEXTS,
        *(text for _, texts in _EOG_FIM for text in texts),
        *(text for _, texts in _FIM for text in texts.split()),
        *_SHOWN_TEXTS,
        *("<mask>", "[MASK]", "<unk>", "<s>"),
    )
)
"""All texts that have a meaning here."""


@dataclass(frozen=True)
class FimTokens:
    """The tokens by which a prompt asks to fill in the middle; None for one that there is not.

    Attributes:
        prefix, suffix, middle: before the text on either side of the gap, and before what fills it.
        repository, file: before the name of a repository, and of each of its files.
    """

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    repository: int | None = None
    file: int | None = None

    @property
    def missing(self) -> list[str]:
        """Names of those without which nothing can be filled in."""
        return [name for name in ("prefix", "suffix", "middle") if getattr(self, name) is None]


def special_id(metadata: Metadata, name: str, default: int | None, n_vocab: int) -> int | None:
    """The id that a key of `tokenizer.ggml` names, or else the default, if it is a token's."""
    for token in (metadata.integer(f"tokenizer.ggml.{name}", None), default):
        if token is not None and 0 <= token < n_vocab:
            return token
    return None


def correct_spm_types(tokens: TokenTexts, types: bytearray, ids: dict[str, int]) -> None:
    """Set the types by which tokens stand for text, so that decoding undoes encoding."""
    for text in BYTE_TEXTS:
        token = ids.get(text)
        if token is not None and types[token] == TokenType.NORMAL:
            types[token] = TokenType.BYTE
    user_defined = ids_of_types(types, (TokenType.USER_DEFINED,))
    for token, text in zip(user_defined, tokens.some(user_defined), strict=True):
        # Written with an escaped space it can't be found in a text, it can only be merged.
        if SPACE in text:
            types[token] = TokenType.NORMAL


def ids_of_types(types: bytearray, wanted: Collection[int]) -> list[int]:
    """The tokens that are of one of these types."""
    import numpy as np

    is_wanted = np.zeros(256, bool)
    is_wanted[[*wanted]] = True
    found: list[int] = np.flatnonzero(is_wanted[np.frombuffer(types, np.uint8)]).tolist()
    return found


def correct_types(
    metadata: Metadata,
    tokens: TokenTexts,
    types: bytearray,
    ids: dict[str, int],
    eos_id: int | None,
) -> tuple[frozenset[int], FimTokens]:
    """Set the types that files are known to get wrong, in place.

    Returns:
        the tokens that end a generation, and those for filling in the middle.
    """
    n_vocab = len(tokens)
    eog: set[int] = set()

    def first(keys: tuple[str, ...], texts: tuple[str, ...]) -> int | None:
        """The id that a key names, or else the id of the first text that is there: then control."""
        for key in keys:
            if (token := special_id(metadata, key, None, n_vocab)) is not None:
                return token
        for text in texts:
            if text in ids:
                types[ids[text]] = TokenType.CONTROL
                return ids[text]
        return None

    prefix, suffix, middle = (first(keys, tuple(texts.split())) for keys, texts in _FIM)
    found = [first((key,), texts) for key, texts in _EOG_FIM]
    _, repository, file = found
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
    return frozenset(eog), FimTokens(prefix, suffix, middle, repository, file)


def shown_ids(ids: dict[str, int], eog_ids: Container[int]) -> frozenset[int]:
    """The control tokens that are part of a text nevertheless."""
    shown = [ids[text] for text in _SHOWN_TEXTS if text in ids]
    end = ids.get(_SHOWN_END)
    if shown and end is not None and end not in eog_ids:
        shown.append(end)
    return frozenset(shown)


_KINDS = {
    "llama": "spm",
    "gpt2": "bpe",
    "gemma4": "bpe",
    "plamo2": "plamo",
    "bert": "wordpiece",
    "t5": "unigram",
}
_WITHOUT_PRE = {
    "spm": "an SPM",
    "plamo": "PLaMo's",
    "wordpiece": "WordPiece",
    "unigram": "a unigram model",
}
_ASSUMED = {"llama": (1, 2, 0), "plamo2": (1, 2, 0), "bert": (101, 102, 100), "t5": (None, 1, 2)}
"""Ids of BOS, EOS and the unknown token where a file does not say, by `tokenizer.ggml.model`."""
_AROUND = {"bert": ("cls_token_id", "seperator_token_id")}
"""Keys of the tokens around a text, where they are not BOS and EOS; the misspelling is GGUF's."""
_ONLY_PRE = {"gemma4": "gemma4"}
"""Models of `tokenizer.ggml.model` whose pre-tokenizer the file need not name."""

_NO_TOKEN = (-1, (1 << 32) - 1)
"""llama.cpp's `LLAMA_TOKEN_NULL`, in either type: the file says that there is none."""


class NoTokenizerError(ModelFileError):
    """The file holds no tokenizer; its model still runs on token ids."""


@dataclass(frozen=True)
class Normalizer:
    """What is done to a text before it is cut (`tokenizer.ggml.*`).

    Attributes:
        lowercase, strip_accents: of WordPiece: capitals, and marks above and below letters.
        charsmap: of unigrams: SentencePiece's compiled map of characters, or nothing.
        merge_spaces: of unigrams: spaces at the ends are left out, and several count as one.
    """

    lowercase: bool = False
    strip_accents: bool = False
    charsmap: bytes = b""
    merge_spaces: bool = False


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """The tokens of one model.

    Attributes:
        kind: "spm" (SentencePiece BPE; `tokenizer.ggml.model` is `llama`), "bpe" (with merges,
            mostly byte-level; `gpt2`, `gemma4`), "plamo" (unigrams; `plamo2`), "wordpiece" (`bert`)
            or "unigram" (SentencePiece unigrams; `t5`).
        pre: name of the pre-tokenizer family; "default" for those but BPE, which have none.
        tokens: text of each id, and id of each text.
        types: `TokenType` of each id.
        scores: of each id, numbers [n_vocab].
        of_characters: a BPE of characters, with `▁` for a space, and not of bytes.
        merges: of a BPE.
        bos_id, eos_id, unk_id: None if there is none.
        eog_ids: tokens that end a generation.
        fim: tokens for filling in the middle.
        add_bos, add_eos: whether special tokens are put around a text by default.
        between_ids: tokens between a query and a document that are scored together.
        add_space_prefix: SPM, unigrams and WordPiece put a space before a text.
        normalizer: what unigrams and WordPiece do to a text first, or None.
        lstrip_ids, rstrip_ids: special tokens that swallow the white space before or after them.
        shown_ids: control tokens that are part of a text nevertheless.
        suppressed_ids: tokens that are never drawn (`tokenizer.ggml.suppress_tokens`).
        warnings: one line each on points that the file leaves open.
    """

    kind: str
    pre: str
    tokens: TokenTexts
    types: bytearray
    scores: npt.NDArray[np.generic]
    merges: MergeTexts
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eog_ids: frozenset[int]
    fim: FimTokens
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    lstrip_ids: frozenset[int] = frozenset()
    rstrip_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()
    suppressed_ids: frozenset[int] = frozenset()
    of_characters: bool = False
    normalizer: Normalizer | None = None
    between_ids: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Vocabulary {self.kind} {self.pre}: {len(self.tokens)} tokens>"


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Read and check the `tokenizer.ggml.*` keys.

    Raises:
        NoTokenizerError: there is none.
        ModelFileError: it is of a kind that is not supported, or malformed.
        UsageError: an option names a pre-tokenizer that does not exist, or the tokenizer has none.
    """
    import numpy as np

    from localkv.loader.gguf_header import Strings
    from localkv.loader.token_texts import MergeTexts, TokenTexts

    kind = _kind(metadata)
    warnings: list[str] = []
    pre = _pre(metadata, warnings) if kind == "bpe" else "default"
    if kind != "bpe" and PRE in metadata.overridden:
        raise UsageError(
            f"no use for pre-tokenizer {metadata[PRE]!r}: the tokenizer is {_WITHOUT_PRE[kind]}"
        )
    metadata.require("tokenizer.ggml.tokens")
    tokens = TokenTexts(metadata.string_array("tokenizer.ggml.tokens"))
    n_vocab = len(tokens)
    if not n_vocab:
        raise ModelFileError("the tokenizer has no tokens")
    normal = np.full(n_vocab, TokenType.NORMAL, np.uint8)
    given_types = metadata.number_array("tokenizer.ggml.token_type", normal, integers=True)
    scores = metadata.number_array("tokenizer.ggml.scores", np.zeros(n_vocab))
    for name, values in (("token_type", given_types), ("scores", scores)):
        if len(values) < n_vocab:
            raise ModelFileError(
                f"tokenizer.ggml.{name} has {len(values)} items for {n_vocab} tokens"
            )
    types = bytearray(given_types[:n_vocab].astype(np.uint8).tobytes())
    family = PRE_TOKENIZERS[pre]
    of_characters = kind == "bpe" and family.of_characters
    ids = tokens.find_all(_KNOWN_TEXTS)
    if kind == "spm" or of_characters:
        ids |= tokens.find_all(BYTE_TEXTS)
        correct_spm_types(tokens, types, ids)
    bos_id, eos_id = bos_and_eos(metadata)
    _, _, unknown_id = _assumed(metadata)
    eog_ids, fim = correct_types(metadata, tokens, types, ids, eos_id)
    add_bos = metadata.boolean("tokenizer.ggml.add_bos_token", kind == "spm" or family.add_bos)
    add_bos |= kind == "wordpiece" or (kind == "bpe" and family.always_bos)
    add_eos = metadata.boolean("tokenizer.ggml.add_eos_token", kind == "unigram")
    add_eos |= kind == "wordpiece"
    for wanted, name, token in ((add_bos, "BOS", bos_id), (add_eos, "EOS", eos_id)):
        if wanted and token is None:
            warnings.append(f"the tokenizer wants {name} around a text, but has none")
    warnings += _strange_ids(metadata, n_vocab)
    lstrip_ids, rstrip_ids = _stripping_ids(metadata, types, ids)
    return Vocabulary(
        kind=kind,
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores[:n_vocab].copy(),
        merges=MergeTexts(_merges(metadata, pre) if kind == "bpe" else Strings.of([])),
        bos_id=bos_id,
        eos_id=eos_id,
        unk_id=special_id(metadata, "unknown_token_id", unknown_id, n_vocab),
        eog_ids=eog_ids,
        fim=fim,
        add_bos=add_bos and bos_id is not None,
        add_eos=add_eos and eos_id is not None,
        add_space_prefix=kind == "wordpiece"
        or (
            kind in ("spm", "unigram")
            and metadata.boolean("tokenizer.ggml.add_space_prefix", kind == "spm")
        ),
        lstrip_ids=lstrip_ids,
        rstrip_ids=rstrip_ids,
        shown_ids=shown_ids(ids, eog_ids),
        suppressed_ids=_suppressed_ids(metadata, n_vocab),
        of_characters=of_characters,
        normalizer=_normalizer(metadata, kind),
        between_ids=_between(metadata, kind, eos_id if add_eos else None, n_vocab),
        warnings=tuple(warnings),
    )


def bos_and_eos(metadata: Metadata) -> tuple[int | None, int | None]:
    """Ids of BOS and EOS. An SPM and PLaMo's have 1 and 2 unless the file says otherwise.

    (llama.cpp assumes 11 for both in a byte-level BPE whose file does not say: Falcon's. Here such
    a file has none, so that generation does not end at a comma.)
    """
    n_vocab = len(metadata.string_array("tokenizer.ggml.tokens"))
    bos_id, eos_id, _ = _assumed(metadata)
    around = _AROUND.get(metadata.string("tokenizer.ggml.model", ""))
    if around is not None:
        bos_id, eos_id = (
            special_id(metadata, name, token, n_vocab)
            for name, token in zip(around, (bos_id, eos_id), strict=True)
        )
    return (
        special_id(metadata, "bos_token_id", bos_id, n_vocab),
        eos_id if around is not None else special_id(metadata, "eos_token_id", eos_id, n_vocab),
    )


def _assumed(metadata: Metadata) -> tuple[int | None, int | None, int | None]:
    model = metadata.string("tokenizer.ggml.model", "")
    return _ASSUMED.get(model, (None, None, None))


def _normalizer(metadata: Metadata, kind: str) -> Normalizer | None:
    import numpy as np

    if kind == "wordpiece":
        lowercase = metadata.boolean("tokenizer.ggml.normalizer.lowercase", True)
        strips = metadata.boolean("tokenizer.ggml.normalizer.strip_accents", lowercase)
        return Normalizer(lowercase=lowercase, strip_accents=strips)
    if kind == "unigram":
        none = np.zeros(0, np.uint8)
        charsmap = metadata.number_array("tokenizer.ggml.precompiled_charsmap", none, integers=True)
        merges = metadata.boolean("tokenizer.ggml.remove_extra_whitespaces", False)
        return Normalizer(charsmap=charsmap.astype(np.uint8).tobytes(), merge_spaces=merges)
    return None


_PAIRED = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
"""Pre-tokenizers of models that want a separator between two texts unless the file denies it."""


def _between(metadata: Metadata, kind: str, eos_id: int | None, n_vocab: int) -> tuple[int, ...]:
    """EOS, and the separator where the model wants one; BERT has one token for both."""
    found = () if eos_id is None else (eos_id,)
    if kind == "wordpiece":
        return found
    paired = metadata.string("tokenizer.ggml.pre", "") in _PAIRED
    separator = special_id(metadata, "seperator_token_id", None, n_vocab)
    if separator is None or not metadata.boolean("tokenizer.ggml.add_sep_token", paired):
        return found
    return (*found, separator)


def _kind(metadata: Metadata) -> str:
    model = metadata.string("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        raise NoTokenizerError("this file holds no tokenizer")
    if model not in _KINDS:
        raise ModelFileError(
            f"tokenizer of kind {model!r} is not supported",
            hint=f"kinds that are: {', '.join(_KINDS)}",
        )
    return _KINDS[model]


_LISTED = "localkv tokenize --help-all lists the pre-tokenizers"


def _pre(metadata: Metadata, warnings: list[str]) -> str:
    pre = metadata.string(PRE, "")
    if PRE in metadata.overridden:
        if pre not in PRE_TOKENIZERS:
            raise unknown_name("unknown pre-tokenizer", pre, PRE_TOKENIZERS, _LISTED)
        return pre
    pre = _ONLY_PRE.get(metadata.string("tokenizer.ggml.model"), pre)
    if not pre:
        warnings.append(
            "the file does not name its pre-tokenizer: 'default' may split text differently from "
            "the model's own (--override-pre NAME chooses another)"
        )
        return "default"
    if pre not in PRE_TOKENIZERS:
        raise ModelFileError(
            f"unknown pre-tokenizer {pre!r:.60}",
            hint=f"--override-pre NAME uses another instead; {_LISTED}",
        )
    return pre


def _merges(metadata: Metadata, pre: str) -> Strings:
    """The merges, which files of Kimi K2 may do without."""
    key = "tokenizer.ggml.merges"
    if pre != "kimi-k2":
        metadata.require(key)
    return metadata.string_array(key)


def _suppressed_ids(metadata: Metadata, n_vocab: int) -> frozenset[int]:
    found = metadata.integers("tokenizer.ggml.suppress_tokens", [])
    return frozenset(token for token in found if 0 <= token < n_vocab)


def _strange_ids(metadata: Metadata, n_vocab: int) -> list[str]:
    """A line on each special id that is no token's, and is not used for that."""
    lines = []
    for name in ("bos", "eos", "eot", "eom", "unknown"):
        token = metadata.integer(f"tokenizer.ggml.{name}_token_id", None)
        if token is not None and token not in _NO_TOKEN and not 0 <= token < n_vocab:
            lines.append(f"{name}_token_id is {token}, which is not among the {n_vocab} tokens")
    return lines


def _stripping_ids(
    metadata: Metadata, types: bytearray, ids: dict[str, int]
) -> tuple[frozenset[int], frozenset[int]]:
    """GGUF has no room for a token's lstrip and rstrip, so they go by the model's name."""
    pre = metadata.string("tokenizer.ggml.pre", "")
    name = metadata.string("general.name", "").lower()
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        return frozenset(ids[text] for text in ("<mask>",) if text in ids), frozenset()
    if "phi-3" in name or "phi3" in name:
        special = {*ids_of_types(types, SPECIAL_TYPES)}
        kept = {ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return frozenset(), frozenset(special - kept)
    if "modern-bert" in name:
        return frozenset(ids[text] for text in ("[MASK]",) if text in ids), frozenset()
    return frozenset(), frozenset()
