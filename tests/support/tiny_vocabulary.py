"""Small tokenizers, trained on the spot and described as a GGUF file would."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from localkv.loader.metadata import Metadata

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # SWIG's, from Python 3.12 on
    import sentencepiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CORPUS = """\
The quick brown fox jumps over the lazy dog, and it's 1234567 times faster than he'd thought!
    def encode(self, text):  # returns ids, e.g. [1, 2, 3]
        return [self.ids[word] for word in text.split()]
Привет, мир! Как дела? Съешь ещё этих мягких французских булок, да выпей чаю.
漢字かな交じり文とカタカナの文章です。日本語のテキストを少し。中文文本也有一些。
Ça va? Où est l'école? Übermut tut selten gut. naïve café résumé
مرحبا بالعالم שלום עולם नमस्ते दुनिया 안녕하세요 세계
The cat sat on the mat. The dog sat on the log.  Two  spaces   and  three.
{"key": "value", "list": [1, 2.5, -3e10], "nested": {"a": null, "b": true}}
🙂 emoji 👍🏽 family 👩‍👩‍👧 flag 🇩🇪
"""


@cache
def spm_model(
    byte_fallback: bool = True,
    user_defined: tuple[str, ...] = (),
    add_dummy_prefix: bool = True,
    vocab_size: int = 700,
) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE, as llama.cpp supports it: no normalisation."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.splitlines() * 2),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=0.999,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        byte_fallback=byte_fallback,
        user_defined_symbols=list(user_defined),
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def spm_metadata(model: sentencepiece.SentencePieceProcessor, **more: Any) -> Metadata:
    """What llama.cpp's converter writes for a SentencePiece model, and more `tokenizer.ggml` keys.

    `user_defined` names the pieces that are, which the library does not tell; `control` adds
    control tokens.
    """
    user_defined, control = more.pop("user_defined", ()), more.pop("control", ())
    tokens = [model.id_to_piece(i) for i in range(model.get_piece_size())]
    types = [
        UNKNOWN
        if model.is_unknown(i)
        else CONTROL
        if model.is_control(i)
        else BYTE
        if model.is_byte(i)
        else USER_DEFINED
        if tokens[i] in user_defined
        else NORMAL
        for i in range(len(tokens))
    ]
    scores = [model.get_score(i) for i in range(len(tokens))]
    values = {
        "model": "llama",
        "tokens": [*tokens, *control],
        "scores": [*scores, *([0.0] * len(control))],
        "token_type": [*types, *([CONTROL] * len(control))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata({**values, **more})


@cache
def _bpe_model() -> tuple[list[str], list[str]]:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True) * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


def bpe_metadata(
    pre: str | None = "gpt-2",
    *,
    control: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    user_defined: Sequence[str] = (),
    **more: Any,
) -> Metadata:
    """A byte-level BPE of some 600 tokens: normal ones, then control, then user-defined ones."""
    tokens, merges = _bpe_model()
    values: dict[str, Any] = {
        "model": "gpt2",
        "tokens": [*tokens, *control, *user_defined],
        "token_type": [NORMAL] * len(tokens)
        + [CONTROL] * len(control)
        + [USER_DEFINED] * len(user_defined),
        "merges": merges,
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens),
    }
    if pre is not None:
        values["pre"] = pre
    return _metadata({**values, **more})


def _metadata(values: dict[str, Any]) -> Metadata:
    """Keys without a prefix are `tokenizer.ggml`'s."""
    return Metadata(
        {
            key if "." in key else f"tokenizer.ggml.{key}": value
            for key, value in values.items()
            if value is not None
        }
    )
