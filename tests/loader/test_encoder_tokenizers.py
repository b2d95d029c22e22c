"""WordPiece and unigrams, as encoders have them: against BERT's tokenizer and SentencePiece."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer

from localkv.config import PRE, Overrides
from localkv.errors import ModelFileError, UsageError
from localkv.loader.metadata import Metadata
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from localkv.loader.vocabulary import TokenType

SCRIPTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps. Can't you see it?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Ёлка зелёная!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Καλημέρα σε όλους",
    "我能吞下玻璃而不伤身体。今天天气很好，我们去公园。",
    "いろはにほへと ちりぬるを。カタカナとひらがな",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "Zażółć gęślą jaźń, naïve café, Ångström, ﬁne ½ ① ａｂｃ emoji 😀👍🏽",
)
"""A sentence of each of ten scripts, and letters that normal forms change."""
ODD = (
    "",
    " ",
    "  a  b ",
    "\n\ttabs\r\n",
    "a" * 101,
    "[CLS] </s> <s>",
    "\ufffd\x00\u200b",
    "\U0010ffff",
)


def random_texts() -> st.SearchStrategy[str]:
    words = [word for text in SCRIPTS for word in text.split()]
    pieces = st.sampled_from([*words, *ODD]) | st.text(max_size=3)
    return st.lists(pieces, max_size=8).map(" ".join)


@pytest.fixture(scope="module")
def bert() -> BertWordPieceTokenizer:
    """A vocabulary that is trained on the texts."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(SCRIPTS, vocab_size=600, min_frequency=1)
    return tokenizer


def wordpiece(bert: BertWordPieceTokenizer, **more: Any) -> Tokenizer:
    """What a file says of it."""
    ids = bert.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    is_control = [token[0] == "[" and token[-1] == "]" and len(token) > 2 for token in tokens]
    written = [
        token if control else token[2:] if token.startswith("##") else "▁" + token
        for token, control in zip(tokens, is_control, strict=True)
    ]
    keys = {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": written,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if control else TokenType.NORMAL) for control in is_control
        ],
        "tokenizer.ggml.unknown_token_id": ids["[UNK]"],
        "tokenizer.ggml.cls_token_id": ids["[CLS]"],
        "tokenizer.ggml.seperator_token_id": ids["[SEP]"],
        **more,
    }
    return tokenizer_from_metadata(Metadata(keys))


@pytest.mark.parametrize("text", [*SCRIPTS, *ODD])
def test_wordpiece_of_ten_scripts(bert: BertWordPieceTokenizer, text: str) -> None:
    """`tokenizers` gives the same ids, but that control tokens in a text are text."""
    ours = wordpiece(bert)
    want = bert.encode(text).ids if "[" not in text else None
    got = ours.encode(text)
    assert want is None or got[1:-1] == want
    assert (got[0], got[-1]) == (bert.token_to_id("[CLS]"), bert.token_to_id("[SEP]"))
    assert ours.encode(text, add_special=False) == got[1:-1]


@given(text=random_texts())
def test_random_texts_in_wordpieces(bert: BertWordPieceTokenizer, text: str) -> None:
    text = text.replace("[", "").replace("]", "")
    assert wordpiece(bert).encode(text, add_special=False) == bert.encode(text).ids


def test_markup_in_wordpieces(bert: BertWordPieceTokenizer) -> None:
    ours = wordpiece(bert)
    mask = ours.token_to_id("[MASK]")
    assert mask in ours.encode("the [MASK] fox", parse_special=True)
    assert mask not in ours.encode("the [MASK] fox")


def test_capitals_and_accents() -> None:
    cased = BertWordPieceTokenizer(lowercase=False, strip_accents=False)
    cased.train_from_iterator([*SCRIPTS, *map(str.lower, SCRIPTS)], 800, min_frequency=1)
    kept = {"tokenizer.ggml.normalizer.lowercase": False}
    for text in SCRIPTS:
        ours = wordpiece(cased, **kept).encode(text, add_special=False)
        assert ours == cased.encode(text).ids
    stripped = {**kept, "tokenizer.ggml.normalizer.strip_accents": True}
    ours = wordpiece(cased, **stripped).encode("café", add_special=False)
    assert ours == cased.encode("cafe").ids


def test_wordpieces_as_text(bert: BertWordPieceTokenizer) -> None:
    ours = wordpiece(bert)
    ids = ours.encode("The quick brown fox")
    assert ours.decode(ids, skip_special=True) == "the quick brown fox"
    assert ours.decode(ids) == "[CLS]the quick brown fox[SEP]"


@pytest.mark.parametrize(("model", "name"), [("bert", "WordPiece"), ("t5", "a unigram model")])
def test_few_tokens(model: str, name: str) -> None:
    """Without an unknown token, and with a pre-tokenizer, for which there is no use."""
    keys = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": ["▁a", "▁b"]}
    with pytest.raises(ModelFileError, match="it has no unknown token"):
        tokenizer_from_metadata(Metadata(keys)).encode("The fox")
    with pytest.raises(UsageError, match=f"the tokenizer is {name}"):
        tokenizer_from_metadata(Metadata(keys).with_overrides(Overrides({PRE: "gpt-2"})))


@pytest.fixture(scope="module")
def spm() -> bytes:
    """A SentencePiece model of unigrams, with XLM-R's map of characters, trained on the texts."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*SCRIPTS] * 3),
        model_writer=model,
        vocab_size=420,
        model_type="unigram",
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return model.getvalue()


def unigram(spm: bytes, **more: Any) -> Tokenizer:
    """What a file says of it."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(spm)
    charsmap = proto.normalizer_spec.precompiled_charsmap
    keys = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in proto.pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.precompiled_charsmap": [*charsmap],
        **more,
    }
    return tokenizer_from_metadata(Metadata(keys))


@pytest.mark.parametrize("text", [*SCRIPTS, *ODD[:5]])
def test_unigrams_of_ten_scripts(spm: bytes, text: str) -> None:
    """SentencePiece's own tokens, between those around a text."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=spm)
    assert unigram(spm).encode(text) == [1, *processor.encode(text), 2]


def test_no_text_is_a_control_token(spm: bytes) -> None:
    ours = unigram(spm)
    for text in ("<s> </s>", "\U0010ffff1", "<unk>"):
        assert not {1, 2} & {*ours.encode(text, add_special=False)}
    assert ours.encode("<s>", add_special=False, parse_special=True) == [1]


def test_maps_of_characters_that_lead_nowhere(spm: bytes) -> None:
    """`tokenizers` would read out of bounds, which ends in a panic of Rust's; here it is a line."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(spm)
    charsmap, rng = proto.normalizer_spec.precompiled_charsmap, random.Random(0)
    n_refused = 0
    for _ in range(60):
        damaged = bytearray(charsmap)
        for _ in range(rng.randrange(1, 2000)):
            damaged[4 + rng.randrange(40_000)] = rng.randrange(256)
        damaged = damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))]
        ours = unigram(spm, **{"tokenizer.ggml.precompiled_charsmap": [*damaged]})
        try:
            for text in (*SCRIPTS, *ODD):
                ours.encode(text)
        except ModelFileError:
            n_refused += 1
    assert n_refused > 30


def test_damaged_unigrams(spm: bytes) -> None:
    with pytest.raises(ModelFileError, match="the tokenizer is malformed"):
        unigram(spm, **{"tokenizer.ggml.precompiled_charsmap": [1, 2, 3]}).encode("a")


def test_unigrams_as_text(spm: bytes) -> None:
    ours = unigram(spm)
    assert ours.decode(ours.encode(SCRIPTS[0]), skip_special=True) == SCRIPTS[0]
