"""A checkpoint's tokenizer as `tokenizer.ggml.*` keys: tokenizer.json, or SentencePiece's model.

Which pre-tokenizer a byte-level BPE has is found by what it does: the one of llama.cpp's that cuts
a text full of difficult places as tokenizer.json does. What was made is tried on that text, too:
the file has to give the tokens that the checkpoint gives.

Special tokens and the chat template are read by gguf-py's `SpecialVocab`. After llama.cpp's
`conversion/base.py`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Regex
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import PreTokenizer as Step
from tokenizers.pre_tokenizers import Sequence as Steps

from localkv.arch.checkpoint import Checkpoint, Config
from localkv.conversion.checkpoint_files import read_json
from localkv.conversion.sentencepiece_model import BPE, UNIGRAM, read_sentencepiece
from localkv.errors import ModelFileError, printable, quoted
from localkv.loader.metadata import Metadata
from localkv.loader.pre_tokenizers import PRE_TOKENIZERS
from localkv.loader.tokenizer import tokenizer_from_metadata
from localkv.loader.vocabulary import BYTE_TEXTS, SPACE, TokenType
from localkv.system.files import read_input

PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n"
    "Hello, hello WORLD HelloWorld iPhone's I'll THEY'LL we've I'M 'tis don'T x'yz a\n"
    "3 33 333 3333 33333 333333 3333333 33333333 3.14 1,000,000 v1.2.3 10:45 7a8b Ⅷ ½\n"
    "été naïve Ångström straße Ελληνικά Привет мир שלום עולם مرحبا 你好世界 日本語カタカナ 한국어\n"
    "🚀🦙 ✅ ¿Qué? «oui» … — ‘q’ “q” ,;:!?.. ...... ---- ====== ''''' `````` \"\"\"\" !!! #$%&*\n"
    "+/<=> @^_{|}~\n"
    "if (x==1) { return a[i]->b; } // ok\r\n\r\n\tfoo_bar=fooBar/BAZ; \t\t end   of    it\n"
    " x (a|b). Wow!Yes.No, a\n\n\n  b \n c/d/\n"
)
"""Places at which tokenizers differ: numbers, case, marks, white space, contractions."""
MARKED = (
    "नमस्ते हिन्दी ไทยภาษา ខ្មែរ বাংলা தமிழ் שָׁלוֹם مَرْحَبًا ПриветМир ΑλφαΒήτα éÉtÉ x\u0303y "
    "\u3000x \u00a0y ٣٤٥٦ 👨\u200d👩\u200d👧"
)
"""Marks and capitals beyond ASCII, which some of llama.cpp's expressions take for other things than
those that the vocabularies were trained with."""

LIKE_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.S)
"""Texts of tokens that are special, though tokenizers say otherwise."""
MOST_TEMPLATE = 1 << 22
"""Most bytes of a chat template."""


@dataclass
class TokenList:
    """Tokens in the order of their ids.

    Attributes:
        texts, types: of each.
        scores: of each; nothing where a tokenizer has none.
    """

    texts: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


class TokenizerFiles:
    """A checkpoint's tokenizer.

    Args:
        folder: the checkpoint.

    Raises:
        ModelFileError: a file is malformed, or there is no tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tokenizer.json"
        self.json = read_json(self.path, needed=False)
        self.settings = read_json(folder / "tokenizer_config.json", needed=False)
        self.fast: FastTokenizer | None = None
        if self.json:
            try:
                self.fast = FastTokenizer.from_str(json.dumps(self.json))
            except Exception as error:  # `tokenizers` raises nothing narrower
                raise ModelFileError(f"{printable(self.path)}: {_first_line(error)}") from None
        names = ("tokenizer.model", "sentencepiece.bpe.model")
        self.pieces = next((p for name in names if (p := folder / name).is_file()), None)
        if self.fast is None and self.pieces is None:
            raise ModelFileError(
                f"{printable(folder)} has no tokenizer",
                hint="tokenizer.json or tokenizer.model belongs beside the weights",
            )

    @property
    def model(self) -> dict[str, Any]:
        model = self.json.get("model")
        return model if isinstance(model, dict) else {}

    @property
    def is_byte_level(self) -> bool:
        """Whether a BPE is one of bytes and not of characters."""
        return self.model.get("type") == "BPE" and not self.model.get("byte_fallback")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]


def add_vocabulary(
    writer: gguf.GGUFWriter, folder: Path, config: Config, checkpoint: Checkpoint
) -> list[str]:
    """Add a tokenizer's keys to a file's.

    Returns:
        a line each on what is not as the checkpoint's files have it.

    Raises:
        ModelFileError: the tokenizer is of a kind that GGUF files can't hold, or malformed.
    """
    files = TokenizerFiles(folder)
    try:
        return _added(writer, files, config, checkpoint)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise ModelFileError(f"{printable(folder)}: its tokenizer makes no sense: {what}") from None


def _added(
    writer: gguf.GGUFWriter, files: TokenizerFiles, config: Config, checkpoint: Checkpoint
) -> list[str]:
    n_vocab = config.integer("vocab_size_per_layer_input", "vocab_size", default=0)
    kind = files.model.get("type")
    has_merges = False
    if checkpoint.architecture == "gemma4" and files.fast is not None:
        tokens, has_merges = _characters(files, n_vocab, shown=GEMMA4_SHOWN), True
        writer.add_tokenizer_model("gemma4")
        tokens.scores = [-1000.0] * len(tokens.texts)
    elif files.pieces is not None and kind != "WordPiece" and not files.is_byte_level:
        tokens = _sentencepiece(writer, files, n_vocab, config)
    elif kind == "BPE" and files.is_byte_level:
        tokens, has_merges = _listed(files, n_vocab), True
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(files, checkpoint))
    elif kind == "BPE":
        tokens = _characters(files, n_vocab)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(_puts_space(files.json))
    elif kind == "WordPiece":
        tokens = _listed(files, n_vocab)
        prefix = files.model.get("continuing_subword_prefix", "##")
        tokens.texts = [
            text
            if kind == TokenType.CONTROL
            else (text.removeprefix(prefix) if text.startswith(prefix) else SPACE + text)
            for text, kind in zip(tokens.texts, tokens.types, strict=True)
        ]
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("default")
        writer.add_token_type_count(config.integer("type_vocab_size", default=1))
    elif kind == "Unigram":
        tokens = _unigrams(writer, files, n_vocab, config)
    else:
        raise ModelFileError(
            f"{printable(files.path)}: a tokenizer of the kind {quoted(str(kind))} is not supported"
        )
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    if tokens.scores:
        writer.add_token_scores(tokens.scores)
    _add_specials(writer, files, checkpoint, len(tokens.texts), has_merges=has_merges)
    for key, value in checkpoint.vocabulary(config).items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    return _tried(writer, files)


GEMMA4_SHOWN = frozenset(
    (
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    )
)
"""Tokens of Gemma 4 that are part of a text, so that calls of tools can be read."""


def _listed(files: TokenizerFiles, n_vocab: int) -> TokenList:
    """The tokens of tokenizer.json; ids without a token are padding."""
    assert files.fast is not None
    ids = files.fast.get_vocab(with_added_tokens=True)
    texts = {i: text for text, i in ids.items()}
    size = n_vocab or max(texts) + 1
    if max(texts) >= size:
        raise ModelFileError(
            f"{printable(files.path)}: token {max(texts)} is not in a vocabulary of {size}, "
            "as config.json has it"
        )
    added = files.fast.get_added_tokens_decoder()
    tokens = TokenList()
    for i in range(size):
        text, kind = texts.get(i, f"[PAD{i}]"), TokenType.NORMAL
        if i not in texts:
            kind = TokenType.UNUSED
        elif i in added:
            if added[i].special or LIKE_SPECIAL.fullmatch(text):
                kind = TokenType.CONTROL
            else:
                text, kind = text.replace(SPACE, " "), TokenType.USER_DEFINED
        tokens.texts.append(text)
        tokens.types.append(int(kind))
    return tokens


def _characters(
    files: TokenizerFiles, n_vocab: int, shown: frozenset[str] = frozenset()
) -> TokenList:
    """A BPE of characters. A token's score is the merge that makes it, the first one best: so
    SentencePiece chooses the pairs that the list of merges chooses."""
    tokens = _listed(files, n_vocab)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_merges(files)):
        ranks.setdefault("".join(pair), rank)
    unknown = files.model.get("unk_token")
    bytes_of = frozenset(BYTE_TEXTS)
    for i, text in enumerate(tokens.texts):
        kind = TokenType(tokens.types[i])
        if kind == TokenType.NORMAL and text in bytes_of:
            tokens.types[i] = int(TokenType.BYTE)
        elif text == unknown and not shown:
            tokens.types[i] = int(TokenType.UNKNOWN)
        elif text in shown:
            tokens.types[i] = int(TokenType.USER_DEFINED)
        tokens.scores.append(-float(ranks[text]) if text in ranks else -1e6)
    return tokens


def _merges(files: TokenizerFiles) -> list[tuple[str, str]]:
    merges = files.model.get("merges") or []
    pairs = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
    return [(first, second) for first, second in pairs]


def _puts_space(values: dict[str, Any]) -> bool:
    """Whether a tokenizer.json puts a space before a text."""
    for step in _steps(values.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend":
            return True
    for step in _steps(values.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _steps(step: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a sequence, or the one step there is."""
    if not isinstance(step, dict):
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [one for one in step.get(name) or [] if isinstance(one, dict)]


def _sentencepiece(
    writer: gguf.GGUFWriter, files: TokenizerFiles, n_vocab: int, config: Config
) -> TokenList:
    """The tokens of a SentencePiece model, with those that transformers adds."""
    assert files.pieces is not None
    model = read_sentencepiece(files.pieces)
    pieces = model.pieces
    if files.pieces.name == "sentencepiece.bpe.model":  # fairseq's order: XLM-RoBERTa
        heads = (("<s>", 3), ("<pad>", 3), ("</s>", 3), ("<unk>", 2))
        pieces = [(text, 0.0, kind) for text, kind in heads] + pieces[3:]
    size = n_vocab or len(pieces)
    tokens = TokenList(
        [f"[PAD{i}]" for i in range(size)], [int(TokenType.UNUSED)] * size, [-10000.0] * size
    )

    def put(i: int, text: str, kind: int, score: float) -> None:
        if 0 <= i < size:
            tokens.texts[i], tokens.types[i], tokens.scores[i] = text, kind, score

    for i, (text, score, kind) in enumerate(pieces):
        put(i, text, kind, score)
    for text, i in read_json(files.folder / "added_tokens.json", needed=False).items():
        put(int(i), text, int(TokenType.USER_DEFINED), -1000.0)
    for i, text, is_special in _added_tokens(files):
        if is_special or LIKE_SPECIAL.fullmatch(text):
            put(i, text, int(TokenType.CONTROL), -1000.0)
        else:
            put(i, text.replace(SPACE, " "), int(TokenType.USER_DEFINED), -1000.0)
    if model.kind == BPE:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        adds_space = files.settings.get("add_prefix_space")
        if adds_space is not None or not model.adds_space:
            writer.add_add_space_prefix(
                bool(model.adds_space if adds_space is None else adds_space)
            )
    elif model.kind == UNIGRAM:
        _add_unigram_keys(writer, config, model.adds_space, model.merges_spaces, model.charsmap)
    else:
        raise ModelFileError(
            f"{printable(files.pieces)}: a SentencePiece model of words or characters is not "
            "supported"
        )
    return tokens


def _added_tokens(files: TokenizerFiles) -> list[tuple[int, str, bool]]:
    """Ids, texts, and whether they are special, of tokens that transformers adds."""
    decoder = files.settings.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        return [(int(i), t["content"], bool(t.get("special"))) for i, t in decoder.items()]
    added = files.json.get("added_tokens") or []
    return [(int(t["id"]), t["content"], bool(t.get("special"))) for t in added]


def _unigrams(
    writer: gguf.GGUFWriter, files: TokenizerFiles, n_vocab: int, config: Config
) -> TokenList:
    """SentencePiece unigrams out of tokenizer.json."""
    tokens = _listed(files, n_vocab)
    vocab = files.model["vocab"]
    tokens.scores = [
        float(vocab[i][1]) if i < len(vocab) else -10000.0 for i in range(len(tokens.texts))
    ]
    unknown = files.model.get("unk_id")
    if type(unknown) is int and unknown < len(tokens.texts):
        tokens.types[unknown] = int(TokenType.UNKNOWN)
    charsmap = b""
    for step in _steps(files.json.get("normalizer"), "normalizers"):
        if step.get("type") == "Precompiled":
            charsmap = b64decode(step.get("precompiled_charsmap") or "")
    merges = not any(
        step.get("type") == "Replace"
        for step in _steps(files.json.get("normalizer"), "normalizers")
    )
    _add_unigram_keys(writer, config, _puts_space(files.json), merges, charsmap)
    return tokens


def _add_unigram_keys(
    writer: gguf.GGUFWriter, config: Config, adds_space: bool, merges_spaces: bool, charsmap: bytes
) -> None:
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(adds_space)
    writer.add_token_type_count(config.integer("type_vocab_size", default=1))
    writer.add_remove_extra_whitespaces(merges_spaces)
    if charsmap:
        writer.add_precompiled_charsmap(charsmap)


def pre_tokenizer(files: TokenizerFiles, checkpoint: Checkpoint) -> str:
    """llama.cpp's name of what cuts texts before the merges.

    Raises:
        ModelFileError: none of those that localkv knows cuts as tokenizer.json does.
    """
    assert files.fast is not None
    ignores = bool(files.model.get("ignore_merges"))
    cuts = [_cuts(files.fast.pre_tokenizer, text) for text in (PROBE, MARKED)]
    alike: dict[tuple[str, ...], int] = {}
    for family in PRE_TOKENIZERS.values():
        if not family.of_characters and family.regexes not in alike:
            splits = [Split(Regex(regex), "isolated") for regex in family.regexes]
            step = Steps([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
            has = [
                _cuts(step, text) == cut for text, cut in zip((PROBE, MARKED), cuts, strict=True)
            ]
            alike[family.regexes] = sum(has) if has[0] else 0
    best = max(alike.values())
    names = [
        name
        for name, family in PRE_TOKENIZERS.items()
        if best
        and alike.get(family.regexes) == best
        and not family.of_characters
        and family.ignore_merges == ignores
    ]
    if not names:
        shown = json.dumps(files.json.get("pre_tokenizer"), ensure_ascii=False)
        raise ModelFileError(
            f"{printable(files.path)}: no pre-tokenizer of llama.cpp's cuts texts as "
            f"{shown if len(shown) < 300 else shown[:300] + '...'}"
            + (" with ignore_merges" if ignores else ""),
            hint="a file in GGUF of the same model names the one that it needs",
        )
    wanted = (checkpoint.pre_tokenizer, checkpoint.architecture)
    return next((name for name in wanted if name in names), names[0])


def _cuts(step: Step | None, text: str) -> list[tuple[str, tuple[int, int]]]:
    """Pieces of a text, in GPT-2's alphabet of bytes, with their places."""
    return [] if step is None else step.pre_tokenize_str(text)


def _add_specials(
    writer: gguf.GGUFWriter,
    files: TokenizerFiles,
    checkpoint: Checkpoint,
    n_vocab: int,
    *,
    has_merges: bool,
) -> None:
    """Ids of special tokens, the merges, and the chat template."""
    special = gguf.SpecialVocab(files.folder, load_merges=has_merges, n_vocab=n_vocab)
    template = files.folder / "chat_template.jinja"
    if special.chat_template is None and template.is_file():  # without tokenizer_config.json
        special.chat_template = read_input(template, MOST_TEMPLATE, printable(template)).decode()
    ids = {} if files.fast is None else files.fast.get_vocab(with_added_tokens=True)
    for name, text in checkpoint.special.items():
        if text in ids:
            special._set_special_token(name, ids[text])
    if "ByteLevel" in (
        step.get("type") for step in _steps(files.json.get("post_processor"), "processors")
    ):
        for name in ("bos", "eos"):
            special.add_special_token.setdefault(name, False)
    special.add_to_gguf(writer, quiet=True)
    for step in _steps(files.json.get("normalizer"), "normalizers"):
        if step.get("type") in ("BertNormalizer", "Lowercase"):
            lowers = bool(step.get("lowercase", True))
            writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowers)
        accents = step.get("strip_accents")
        if step.get("type") == "StripAccents" or accents is not None:
            writer.add_bool("tokenizer.ggml.normalizer.strip_accents", accents is not False)


def _tried(writer: gguf.GGUFWriter, files: TokenizerFiles) -> list[str]:
    """Compare the tokens of the probe, and whether BOS comes first.

    Raises:
        ModelFileError: a byte-level BPE gives others.
    """
    if files.fast is None:
        return []
    values = {key: value.value for key, value in writer.kv_data[0].items()}
    tokenizer = tokenizer_from_metadata(Metadata(values, printable(files.path)))
    with_specials = files.fast.encode("a").ids
    adds_bos = tokenizer.bos_id is not None and with_specials[:1] == [tokenizer.bos_id]
    if tokenizer.add_bos and not adds_bos and "tokenizer.ggml.add_bos_token" not in values:
        writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for line in (PROBE, MARKED):
        wanted = files.fast.encode(line, add_special_tokens=False).ids
        made = tokenizer.encode(unicodedata.normalize("NFC", line), add_special=False)
        if made == wanted:
            continue
        if files.is_byte_level and line != MARKED:
            raise ModelFileError(
                f"{printable(files.path)}: {quoted(line)} has other tokens in a GGUF file: "
                f"{made[:8]} in place of {wanted[:8]}",
                hint="its tokenizer changes texts in a way that GGUF files can't express",
            )
        return [f"{quoted(line)} has other tokens than by tokenizer.json, as in llama.cpp"]
    return []
