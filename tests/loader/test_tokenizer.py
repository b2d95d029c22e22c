"""Ids of texts: against llama.cpp's vocabularies, SentencePiece itself, and rules of our own."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localkv.config import PRE, Overrides
from localkv.errors import ModelFileError, UsageError
from localkv.loader import load_tokenizer
from localkv.loader.metadata import Metadata
from localkv.loader.pre_tokenizers import PRE_TOKENIZERS
from localkv.loader.tokenizer import Tokenizer, tokenizer_from_metadata
from localkv.loader.vocabulary import NoTokenizerError
from support.tiny_vocabulary import CORPUS, UNUSED, bpe_metadata, spm_metadata, spm_model

VOCABULARIES = ("gpt-2", "llama-bpe", "llama-spm", "qwen2")
PIECES = (
    *CORPUS.split(),
    *(" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x85", "\xa0", "\u2028", "\u3000", "\ufeff", "\x00"),
    *("'s", "'LL", "don'T", "1", "12", "1234", "½", "²", "e\u0301", "\u200b", "ﬀ", "Ａ", "𐐀", "𠀀"),
    *("<s>", "</s>", "<unk>", "<|im_end|>", "<|im_start|>", "<0x41>", "<", "|>", "\U0010ffff"),
)


def random_texts(seed: int, n: int) -> list[str]:
    """Words and pieces of words, odd characters, white space and the texts of special tokens."""
    rng = random.Random(seed)

    def piece() -> str:
        text = rng.choice(PIECES)
        if rng.random() < 0.2:
            return text[: rng.randrange(len(text) + 1)]
        if rng.random() < 0.1:
            return chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))))
        return text + rng.choice(("", "", " "))

    return ["".join(piece() for _ in range(rng.randrange(20))) for _ in range(n)]


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.id_to_token(token) for token in ids]


def spm(model: Any = None, **more: Any) -> Tokenizer:
    return tokenizer_from_metadata(spm_metadata(model or spm_model(), **more))


def bpe(pre: str | None = "gpt-2", **more: Any) -> Tokenizer:
    return tokenizer_from_metadata(bpe_metadata(pre, **more))


# --- llama.cpp's vocabularies


@pytest.fixture(scope="session")
def vocabularies(conformance: Path) -> dict[str, Tokenizer]:
    folder = conformance / "tokenizers"
    return {name: load_tokenizer(folder / f"ggml-vocab-{name}.gguf") for name in VOCABULARIES}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_texts_of_llama_cpp(
    name: str, vocabularies: dict[str, Tokenizer], conformance: Path
) -> None:
    tokenizer = vocabularies[name]
    path = conformance / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(path.name + ".inp").read_bytes().decode("utf-8")
    ids = path.with_name(path.name + ".out").read_text().splitlines()
    cases = texts.split("\n__ggml_vocab_test__\n")
    assert len(cases) == len(ids) or (len(cases) == len(ids) + 1 and not cases[-1])
    assert len(ids) >= 46
    for text, expected in zip(cases, ids, strict=False):
        found = tokenizer.encode(text, add_special=False)
        assert found == [int(token) for token in expected.split()], text
        assert tokenizer.decode(found) == text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_decode_undoes_encode_with_real_vocabularies(
    name: str, vocabularies: dict[str, Tokenizer]
) -> None:
    tokenizer = vocabularies[name]
    for text in random_texts(1, 300):
        ids = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(ids) == text
        assert not any(map(tokenizer.is_control, ids))
        assert (
            tokenizer.decode(tokenizer.encode(text, parse_special=True)[tokenizer.add_bos :])
            == text
        )


def test_what_the_vocabularies_say(vocabularies: dict[str, Tokenizer]) -> None:
    llama_bpe, llama_spm, qwen2 = (vocabularies[n] for n in ("llama-bpe", "llama-spm", "qwen2"))
    assert (llama_bpe.kind, llama_bpe.pre, llama_bpe.n_vocab) == ("bpe", "llama-bpe", 128256)
    assert llama_bpe.add_bos
    assert texts_of(llama_bpe, sorted(llama_bpe.eog_ids)) == ["<|end_of_text|>", "<|eot_id|>"]
    assert (llama_spm.kind, llama_spm.add_bos, llama_spm.eog_ids) == ("spm", True, {2})
    assert (qwen2.pre, qwen2.add_bos) == ("qwen2", False)
    assert {"<|endoftext|>", "<|im_end|>"} < set(texts_of(qwen2, sorted(qwen2.eog_ids)))
    assert llama_spm.encode("") == [1]
    assert llama_spm.encode("Hello")[0] == 1
    assert llama_bpe.encode("", add_special=False) == []


@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm"])
def test_long_texts_are_fast(name: str, vocabularies: dict[str, Tokenizer]) -> None:
    tokenizer = vocabularies[name]
    tokenizer.encode("built on first use")
    for text in ("a" * 100_000, " " * 100_000, CORPUS * 100, "<|eot_id|></s>" * 7_000):
        start = time.perf_counter()
        ids = tokenizer.encode(text, parse_special=True)
        tokenizer.decode(ids)
        assert time.perf_counter() - start < 5  # some 0.1 s; a quadratic algorithm takes minutes


# --- SentencePiece


@pytest.mark.parametrize(
    ("byte_fallback", "user_defined", "space_prefix"),
    [
        (True, (), True),
        (True, (), False),
        (False, (), True),
        (True, ("<sep>", "@@", "the"), False),
        (False, ("<sep>", "\n\n"), False),
    ],
)
def test_same_ids_as_sentencepiece(
    byte_fallback: bool, user_defined: tuple[str, ...], space_prefix: bool
) -> None:
    model = spm_model(byte_fallback, user_defined, space_prefix)
    tokenizer = spm(model, user_defined=user_defined, add_space_prefix=space_prefix)
    for text in [*random_texts(2, 1000), *CORPUS.splitlines(), "a<sep>@@b\n\n\nthe@the"]:
        ids = tokenizer.encode(text, add_special=False)
        assert ids == model.encode(text), text
        if byte_fallback:
            assert tokenizer.decode(ids) == text


def test_spm_of_equal_scores_merges_from_the_left() -> None:
    n_vocab = spm_model().get_piece_size()
    tokenizer = spm(scores=[0.0] * n_vocab)
    assert texts_of(tokenizer, tokenizer.encode("thethe", add_special=False))[0] == "▁the"
    for text in random_texts(3, 200):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_spm_without_types_still_falls_back_to_bytes() -> None:
    tokenizer = spm(token_type=None)
    assert tokenizer.decode(tokenizer.encode("\x01Ω", add_special=False)) == "\x01Ω"


def test_spm_puts_a_space_after_special_tokens_and_takes_it_back() -> None:
    tokenizer = spm(spm_model(user_defined=("<sep>",)), user_defined=("<sep>",))
    ids = tokenizer.encode("the<sep>the</s> the", parse_special=True)
    assert texts_of(tokenizer, ids)[:5] == ["<s>", "▁the", "<sep>", "▁the", "</s>"]
    assert tokenizer.decode(ids) == "<s>the<sep>the</s> the"
    assert tokenizer.decode(ids, skip_special=True) == "the<sep>the the"
    assert tokenizer.token_bytes(ids[1]) == b" the"


def test_user_defined_spaces_are_merged_like_others() -> None:
    tokenizer = spm(spm_model(user_defined=("▁▁",)), user_defined=("▁▁",))
    for text in ("a  b", "a   b", "    x", "  "):
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_spm_model_that_sentencepiece_refuses() -> None:
    tokenizer = spm(tokens=["<unk>", "x" * 10**5], token_type=[2, 1], scores=[0.0, 0.0])
    with pytest.raises(ModelFileError, match="the tokenizer is malformed"):
        tokenizer.encode("text")


def test_spm_tokens_that_sentencepiece_would_refuse() -> None:
    tokens = spm_metadata(spm_model()).strings("tokenizer.ggml.tokens")
    tokenizer = spm(tokens=[*tokens[:-3], "the", "a\0b", ""])
    assert tokenizer.decode(tokenizer.encode("the a\0b", add_special=False)) == "the a\0b"


def test_several_unknown_tokens() -> None:
    """Phi-3's file has fifty."""
    model = spm_model()
    types = spm_metadata(model).integers("tokenizer.ggml.token_type")
    types[-3:] = [2, 2, 2]
    tokenizer = spm(token_type=types)
    assert tokenizer.encode("the cat", add_special=False) == model.encode("the cat")


# --- byte-level BPE


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "It's 1234\n\nDON'T  x_y é½!!", "It|'s| 1234|\n|\n|DON|'|T| | x|_|y| é|½|!!"),
        ("llama-bpe", "It's 1234\n\nDON'T  x_y", "It|'s| |123|4|\n\n|DON|'T| | x|_y"),
        ("qwen2", "It's 1234\n\nDON'T  x_y", "It|'s| |1|2|3|4|\n\n|DON|'T| | x|_y"),
        ("qwen2", "क्षि", "क|्ष|ि"),
        ("qwen35", "क्षि 12", "क्षि| |1|2"),
        ("tekken", "HelloWORLDwide 12 ÉCOLE/\n", "Hello|WORLDwide| |1|2| É|COLE|/\n"),
        ("gpt-4o", "It's camelCase 1234//\n", "It's| camel|Case| |123|4|//\n"),
        ("smollm", "a 12'll\n x", "a| |1|2|'ll|\n| x"),
        ("falcon", "x=1234, y", "x|=|123|4|,| y"),
        ("deepseek-llm", "Hi 漢字 12\n\nok", "Hi| |漢字| |12|\n|\n|ok"),
        ("deepseek-coder", "a.b 12 漢", "a|.|b| |1|2| |漢"),
        ("deepseek-v3", "x.foo 1234カナ!", "x|.foo| |123|4|カナ|!"),
        ("default", "x+1234 y", "x|+|123|4| y"),
        ("bloom", "a, b。c", "a|,| b|。|c"),
    ],
)
def test_pre_tokenizers(pre: str, text: str, pieces: str) -> None:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Sequence, Split

    splits = [Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[pre].regexes]
    assert "|".join(piece for piece, _ in Sequence(splits).pre_tokenize_str(text)) == pieces


@pytest.mark.parametrize(
    "pre", sorted(pre for pre, family in PRE_TOKENIZERS.items() if not family.of_characters)
)
def test_every_family_keeps_the_text(pre: str) -> None:
    tokenizer = bpe(pre)
    for text in [CORPUS, *random_texts(4, 20)]:
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_ignore_merges() -> None:
    """A word that is a token is that token, though no merge leads to it."""
    metadata = bpe_metadata("llama-bpe")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    more = {
        "tokens": [*tokens, "zyxw"],
        "token_type": [*metadata.integers("tokenizer.ggml.token_type"), 1],
    }
    assert bpe("llama-bpe", **more).encode("zyxw", add_special=False) == [len(tokens)]
    assert len(bpe("qwen2", **more).encode("zyxw", add_special=False)) > 1


def test_bytes_without_a_token_are_left_out_and_still_separate() -> None:
    tokens = bpe_metadata().strings("tokenizer.ggml.tokens")
    merges = bpe_metadata().strings("tokenizer.ggml.merges")
    assert "h e" in merges
    x = tokens.index("x")
    tokenizer = bpe(tokens=["[gone]" if i == x else token for i, token in enumerate(tokens)])
    assert texts_of(tokenizer, tokenizer.encode("hxe", add_special=False)) == ["h", "e"]
    assert texts_of(tokenizer, tokenizer.encode("he", add_special=False)) == ["he"]


def test_merges_of_what_is_no_token() -> None:
    merges = [*bpe_metadata().strings("tokenizer.ggml.merges"), "not there", "x", "", "a b c"]
    tokenizer = bpe(merges=merges)
    assert tokenizer.encode("the cat") == bpe().encode("the cat")


def test_text_out_of_the_byte_alphabet_stands_for_itself() -> None:
    metadata = bpe_metadata(user_defined=("‼",))
    types = metadata.integers("tokenizer.ggml.token_type")
    types[-1] = 1
    tokenizer = bpe(user_defined=("‼",), token_type=types)
    assert tokenizer.token_bytes(tokenizer.n_vocab - 1) == "‼".encode()


def test_unused_tokens_have_no_text() -> None:
    types = bpe_metadata().integers("tokenizer.ggml.token_type")
    types[0] = UNUSED
    assert bpe(token_type=types).token_bytes(0) == b""


# --- special tokens


@pytest.mark.parametrize("make", [spm, bpe])
def test_control_tokens_only_on_request(make: Any) -> None:
    tokenizer = make(control=("<|endoftext|>", "<|im_end|>"))
    text = "a <|im_end|> b <|endoftext|> </s>"
    plain = tokenizer.encode(text, add_special=False)
    assert not any(map(tokenizer.is_control, plain))
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    assert tokenizer.token_to_id("<|im_end|>") in parsed
    assert tokenizer.token_to_id("<|endoftext|>") in parsed
    assert tokenizer.decode(plain) == tokenizer.decode(parsed) == text
    assert "<|" not in tokenizer.decode(parsed, skip_special=True)


def test_no_text_merges_into_a_control_token() -> None:
    """llama.cpp looks up any word when it ignores merges, and any merge in an SPM."""
    tokenizer = bpe("llama-bpe", control=("SYSTEM", "<x"))
    assert not any(map(tokenizer.is_control, tokenizer.encode("SYSTEM <x SYSTEM", False)))
    tokenizer = spm(control=("the",))
    assert not any(map(tokenizer.is_control, tokenizer.encode("in the then", False)))


def test_user_defined_tokens_are_always_matched_and_longer_ones_first() -> None:
    tokenizer = bpe(user_defined=("<a>", "a><b>", "@@", "@@@"))
    ids = tokenizer.encode("<a><b> @@@@@x", add_special=False)
    assert texts_of(tokenizer, ids) == ["<", "a><b>", "Ġ", "@@@", "@@", "x"]


def test_special_tokens_that_swallow_white_space() -> None:
    """Phi-3's, by the model's name, since GGUF does not say."""
    control = ("<|user|>", "<|end|>", "<|endoftext|>")
    name = {"general.name": "Some Phi-3 mini"}
    tokenizer = spm(control=control, **name)
    plain = spm(control=control)
    text, stripped = "<|user|>\n \tthe<|endoftext|> cat", "<|user|>the<|endoftext|> cat"
    assert tokenizer.encode(text, False, True) == plain.encode(stripped, False, True)
    masked = bpe("jina-v2-code", control=("<mask>",))
    assert masked.decode(masked.encode("a \n<mask> b", False, True)) == "a<mask> b"


def test_segments_are_one_text() -> None:
    tokenizer = bpe(user_defined=("@@@",))
    whole = "<|im_start|>user\nHello wor@@@ld<|im_end|>"
    for cut in range(len(whole)):
        segments = [(whole[:cut], True), (whole[cut:], True)]
        assert tokenizer.encode_segments(segments) == tokenizer.encode(whole, parse_special=True)
    for cut in range(12, len(whole) - 10):
        segments = [(whole[:12], True), (whole[12:cut], False), (whole[cut:], True)]
        assert tokenizer.encode_segments(segments) == tokenizer.encode(whole, parse_special=True)


@given(
    texts=st.lists(
        st.tuples(
            st.lists(st.sampled_from(("<|im_", "end|>", "<|im_end|>", "a", " b")), max_size=4).map(
                "".join
            ),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_control_tokens_come_out_of_markup_only(texts: list[tuple[str, bool]]) -> None:
    tokenizer = bpe()
    end = tokenizer.token_to_id("<|im_end|>")
    ids = tokenizer.encode_segments(texts)
    # Each control token's characters, all of them, are within runs of markup.
    markup = "".join(text if is_markup else "\0" for text, is_markup in texts if text)
    assert ids.count(end) == markup.count("<|im_end|>")
    assert tokenizer.decode(ids) == "".join(text for text, _ in texts)


# --- special ids


def test_bos_and_eos() -> None:
    bos = bpe().bos_id
    assert bpe("gpt-2").encode("a")[0] != bos
    assert bpe("llama-bpe").encode("a")[0] == bos
    assert bpe("llama-bpe", add_bos_token=False).encode("a")[0] != bos
    both = bpe("gpt-2", add_bos_token=True, add_eos_token=True)
    assert both.encode("") == [both.bos_id, both.eos_id]
    assert both.encode("", add_special=False) == []
    none = bpe("llama-bpe", bos_token_id=None, eos_token_id=10**6)
    assert (none.bos_id, none.eos_id, none.add_bos) == (None, None, False)
    assert none.encode("a") == bpe().encode("a")
    assert any("BOS" in warning for warning in none.warnings)
    bare = spm(bos_token_id=None, eos_token_id=None)
    assert (bare.bos_id, bare.eos_id) == (1, 2)


def test_end_of_generation() -> None:
    def eog(*control: str, **more: Any) -> set[str]:
        tokenizer = bpe(control=("<bos>", *control), **more)
        return set(texts_of(tokenizer, list(tokenizer.eog_ids))) - {"<bos>"}  # EOS too

    assert eog("<|eot_id|>", "<end_of_turn>", "[EOT]") == {"<|eot_id|>", "<end_of_turn>", "[EOT]"}
    assert eog("<|fim_pad|>", "<REPO>", "<|file_sep|>") == {"<|fim_pad|>", "<REPO>", "<|file_sep|>"}
    assert eog("<|end|>", "</s>") == {"<|end|>", "</s>"}
    # gpt-oss ends channels with <|end|>, Gemma 4 has </s> as text
    assert eog("<|end|>", "<|return|>", "<|call|>") == {"<|return|>", "<|call|>"}
    assert eog("</s>", "<|tool_response>") == {"<|tool_response>"}
    n_normal = bpe().bos_id
    assert n_normal is not None
    assert eog("mine", "other", eot_token_id=n_normal + 1) == {"mine"}


@pytest.mark.parametrize(
    ("control", "more", "expected"),
    [
        # what a family's file has, BOS being no end: the keys of its ids, and the ends
        ("<|end|> <|return|> <|call|> <|start|>", {"eos": "<|return|>"}, "<|return|> <|call|>"),
        (
            "<|endoftext|> <|user|> <|observation|> <|assistant|>",
            {"eos": "<|endoftext|>", "eot": "<|user|>", "eom": "<|observation|>"},
            "<|endoftext|> <|user|> <|observation|>",
        ),
        ("<eos> <turn|> <|turn> <|tool_response> </s>", {}, "<eos> <turn|> <|tool_response>"),
        ("[e~[ ]~b] ]~!b[", {}, "[e~["),
        ("[EOS] [EOT] <|im_end|> <|im_user|>", {}, "[EOS] [EOT] <|im_end|>"),
        ("<|end|> <|user|> <|endoftext|>", {}, "<|end|> <|endoftext|>"),
        ("<｜User｜> <｜end▁of▁sentence｜>", {}, "<｜end▁of▁sentence｜>"),
        ("<|eot|> <|eom|> <|header_start|>", {"eos": "<|eot|>"}, "<|eot|>"),
        ("<seed:bos> <seed:eos>", {"eos": "<seed:eos>"}, "<seed:eos>"),
        ("[|endofturn|] [|user|]", {"eos": "[|endofturn|]"}, "[|endofturn|]"),
        ("<|start_of_role|> <|end_of_text|>", {}, "<|end_of_text|>"),
        ("<|assistant_end|> <|inner_prefix|>", {"eos": "<|assistant_end|>"}, "<|assistant_end|>"),
    ],
)
def test_ends_of_turns_of_families(control: str, more: dict[str, str], expected: str) -> None:
    texts = ("<bos>", *control.split())
    first = bpe(control=("<bos>",)).token_to_id("<bos>")
    assert first is not None
    ids = {f"{key}_token_id": first + texts.index(text) for key, text in more.items()}
    tokenizer = bpe(control=texts, **{"eos_token_id": None, **ids})
    assert set(texts_of(tokenizer, list(tokenizer.eog_ids))) == set(expected.split())


def test_control_tokens_that_a_file_calls_something_else() -> None:
    tokenizer = bpe(user_defined=("<|eot_id|>", "<fim_suffix>", "<|channel|>"))
    kinds = {
        text: tokenizer.is_control(tokenizer.token_to_id(text) or 0)
        for text in ("<|eot_id|>", "<fim_suffix>", "<|channel|>")
    }
    assert kinds == {"<|eot_id|>": True, "<fim_suffix>": True, "<|channel|>": False}


# --- robustness


@given(text=st.text())
@example("\x00a\x00")
@example("👩‍👩‍👧‍👦 🇩🇪e\u0301\r\n\u2028")
@example(" leading and trailing ")
@pytest.mark.parametrize("kind", ["spm", "bpe", "llama-bpe"])
def test_decode_undoes_encode(kind: str, text: str) -> None:
    if kind == "spm":
        text = text.replace("▁", "_")  # for SentencePiece that is a space
    tokenizer = spm() if kind == "spm" else bpe("gpt-2" if kind == "bpe" else kind)
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text


@pytest.mark.parametrize("make", [spm, bpe])
def test_lone_surrogates_count_as_replacement_characters(make: Any) -> None:
    tokenizer = make()
    assert tokenizer.encode("a\ud800b\udcff") == tokenizer.encode("a\ufffdb\ufffd")


def test_ids_that_do_not_exist() -> None:
    tokenizer = bpe()
    for token in (-1, tokenizer.n_vocab):
        with pytest.raises(UsageError, match=f"token {token} is not in the vocabulary"):
            tokenizer.decode([token])
        with pytest.raises(UsageError):
            tokenizer.id_to_token(token)
    assert tokenizer.token_to_id("no such token") is None


@pytest.mark.parametrize("model", ["none", "no_vocab", None])
def test_no_tokenizer(model: str | None) -> None:
    with pytest.raises(NoTokenizerError, match="this file holds no tokenizer"):
        bpe(model=model)


@pytest.mark.parametrize("model", ["rwkv", "whitespace"])
def test_kinds_that_are_not_supported(model: str) -> None:
    with pytest.raises(ModelFileError, match=f"'{model}' is not supported") as raised:
        bpe(model=model)
    assert not isinstance(raised.value, NoTokenizerError)


def test_pre_tokenizer_names() -> None:
    with pytest.raises(ModelFileError, match="unknown pre-tokenizer 'new-one'") as raised:
        bpe("new-one")
    assert raised.value.hint is not None
    assert "--override-pre NAME" in raised.value.hint
    assert "localkv tokenize --help-all" in raised.value.hint
    metadata = bpe_metadata("new-one")
    assert (
        tokenizer_from_metadata(metadata.with_overrides(Overrides({PRE: "qwen2"}))).pre == "qwen2"
    )
    with pytest.raises(UsageError, match="unknown pre-tokenizer 'qwen3'; did you mean qwen35"):
        tokenizer_from_metadata(metadata.with_overrides(Overrides({PRE: "qwen3"})))
    with pytest.raises(UsageError, match="the tokenizer is an SPM"):
        tokenizer_from_metadata(spm_metadata(spm_model()).with_overrides(Overrides({PRE: "qwen2"})))
    nameless = bpe(None)
    assert nameless.pre == "default"
    assert len(nameless.warnings) == 1
    assert "--override-pre" in nameless.warnings[0]
    assert bpe().warnings == ()


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": []},
        {"tokens": None},
        {"tokens": [1, 2]},
        {"token_type": [1]},
        {"scores": [0.0]},
        {"merges": None},
        {"bos_token_id": "one"},
        {"add_bos_token": 1},
    ],
)
def test_malformed_files(more: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        bpe(**more)


def test_odd_tokens() -> None:
    metadata = bpe_metadata()
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    tokenizer = bpe(tokens=[*tokens, "", "the", "a"], token_type=[*types, 1, 99, 3])
    assert tokenizer.id_to_token(len(tokens)) == f"[EMPTY_{len(tokens)}]"
    assert tokenizer.encode("the cat") == bpe().encode("the cat")


def test_does_not_change_the_metadata() -> None:
    metadata = bpe_metadata(user_defined=("<|eot_id|>",))
    before = list(metadata.integers("tokenizer.ggml.token_type"))
    tokenizer_from_metadata(metadata).encode("x")
    assert metadata.integers("tokenizer.ggml.token_type") == before


def test_load_tokenizer_wants_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        load_tokenizer(tmp_path / "absent.gguf")


def test_metadata_without_anything() -> None:
    with pytest.raises(NoTokenizerError):
        tokenizer_from_metadata(Metadata({}))


def test_importing_costs_little() -> None:
    program = (
        "import sys, localkv.loader.tokenizer, localkv.loader.chat_template\n"
        "heavy = 'torch', 'tokenizers', 'sentencepiece', 'jinja2', 'numpy', 'gguf'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert shown.stdout.strip() == b"[]"
