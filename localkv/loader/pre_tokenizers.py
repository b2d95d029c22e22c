"""The table of byte-level BPE families: how `tokenizer.ggml.pre` splits a text before merging.

A family's regular expressions are facts of the vocabularies that were trained with them. They are
stated as llama.cpp reads them (`llm_tokenizer_bpe` in `src/llama-vocab.cpp`, `src/unicode.cpp`), in
the syntax of Oniguruma, which `tokenizers` uses. Oniguruma also decides which characters are
letters: it knows Unicode 16, llama.cpp 15. This file knows nothing about tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """One family.

    Attributes:
        regexes: applied in turn. Each cuts every piece that the one before left into its matches
            and the text between them; a match never reaches into a neighbouring piece.
        ignore_merges: a piece that is a token as a whole is that token, despite the merges.
        add_bos: whether BOS is added where the file does not say (`tokenizer.ggml.add_bos_token`).
        of_characters: merges are of characters, with `▁` for a space, and a character without a
            token becomes SentencePiece's tokens of its bytes; else they are of GPT-2's bytes.
        newline_tokens: a piece of line breaks that is a token is that token, despite the merges.
        always_bos: BOS is added whatever the file says.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    of_characters: bool = False
    newline_tokens: bool = False
    always_bos: bool = False


_SPACES = r"\s+(?!\S)|\s+"
_LINES_AND_SPACES = r"\s*[\r\n]+|" + _SPACES
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_NO_WORD = r"[^\r\n\p{L}\p{N}]"  # the one character that a word may carry in front
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+|" + _SYMBOLS + "|" + _SPACES


def _llama3(digits: str, spaces: str = _SPACES) -> str:
    words = rf"{_CONTRACTION}|{_NO_WORD}?\p{{L}}+"
    return rf"{words}|{digits}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|{spaces}"


def _cased(digits: str, ending: str = "", letters: str = r"\p{L}") -> str:
    """Words split where case changes. Only ASCII has case here, as in llama.cpp."""
    upper, lower = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    words = f"{_NO_WORD}?{upper}*{lower}+{ending}|{_NO_WORD}?{upper}+{lower}*{ending}"
    return rf"{words}|{digits}|{_SYMBOLS}[\r\n/]*|{_LINES_AND_SPACES}"


_ONE_DIGIT, _THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
_QWEN2 = _llama3(_ONE_DIGIT)
_GPT4O = _cased(_THREE_DIGITS, _CONTRACTION + "?")
_QWEN35 = (
    rf"{_CONTRACTION}|{_NO_WORD}?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Written as code points, since looks do not tell one letter from another. llama.cpp does not see
# white space beyond ASCII in these, the ideographic space (U+3000) for one.
_CJK_DEEPSEEK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff" + r"&&[^\s]]+"
_CASED_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_JAIS2_SPACES = (
    "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"
)
_LINES = r"[^\n]+|\n+"
_HAN = (
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df"
    "\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
)
_KIMI = (
    rf"[{_HAN}]+|{_NO_WORD}?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"|{_SYMBOLS}[\r\n]*|{_LINES_AND_SPACES}"
)


def _from_the_right(n: int) -> str:
    """Digits in groups of `n`; the first ones stay with the text before them, as in llama.cpp."""
    first = rf"\p{{N}}{{1,{n}}}(?=(?:\p{{N}}{{{n}}})*+(?!\p{{N}}))"
    return rf"\P{{N}}++\z|\P{{N}}*+{first}"


def _before_groups(n: int) -> str:
    """A cut before each group of `n` ASCII digits, counted from the right."""
    groups = rf"(?:[0-9]{{{n}}})++(?![0-9])"
    return rf"(?={groups})[0-9]{{{n}}}(?:(?!{groups})[\s\S])*"


# Groups of 300 first: whether one of three begins here takes a look at all digits that follow.
_THREES = (_from_the_right(300), _from_the_right(3))
_SUPERBPE_THREES = (_before_groups(300), _before_groups(3))
_LETTERS_AND_MARKS = (
    rf"{_NO_WORD}?[\p{{L}}\p{{M}}]+{_CONTRACTION}?|%s|{_SYMBOLS}[\r\n/]*|{_LINES_AND_SPACES}"
)
# The third range has Yi and Hangul, too: llama.cpp has U+8C48 for U+F900, which looks like it.
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _DEEPSEEK3_KANA
)

_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_llama3(_THREE_DIGITS),), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_llama3(_THREE_DIGITS),))),
    ("glm4 glm5", PreTokenizer((_llama3(_THREE_DIGITS),), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("tekken", PreTokenizer((_cased(_ONE_DIGIT),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"
        " modern-bert roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
                r"\s+$",
                _CJK_DEEPSEEK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK, r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer(
            (_THREE_DIGITS, _DEEPSEEK3_KANA, rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_LINES_AND_SPACES}")
        ),
    ),
    (
        "spark2_5",
        PreTokenizer(
            (_THREE_DIGITS, _DEEPSEEK3_KANA, rf"{_DEEPSEEK3_WORDS}|[\r\n]|{_SPACES}", r"\p{N}")
        ),
    ),
    ("minicpm5", PreTokenizer((_THREE_DIGITS, _llama3(r"\p{N}+")), ignore_merges=True)),
    ("jais-2", PreTokenizer((_llama3(_THREE_DIGITS, _JAIS2_SPACES),))),
    ("youtu", PreTokenizer((_YOUTU_SCRIPTS, _LETTERS_AND_MARKS % _ONE_DIGIT), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((*_THREES, _LETTERS_AND_MARKS % _THREE_DIGITS))),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (_cased(_THREE_DIGITS, _CONTRACTION + "?", r"\p{L}\p{M}"),), ignore_merges=True
        ),
    ),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("superbpe", PreTokenizer((r"\p{N}+", *_SUPERBPE_THREES))),
    (
        "afmoe",
        PreTokenizer((*_THREES, _AFMOE_SCRIPTS, rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_LINES_AND_SPACES}")),
    ),
    (
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((_LINES,), of_characters=True, newline_tokens=True, always_bos=True),
    ),
    ("sarvam-moe", PreTokenizer((_LINES,), of_characters=True)),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_NO_WORD}?\p{{L}}+|\p{{N}}"
                rf"|{_SYMBOLS}[\r\n]*|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    (
        "seed-coder",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_NO_WORD}?\p{{L}}+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES_AND_SPACES}",
            )
        ),
    ),
    (
        "ufakzeka",
        PreTokenizer((rf"{_NO_WORD}?\p{{L}}+|\p{{N}}|{_SYMBOLS}[\r\n]*|{_LINES_AND_SPACES}",)),
    ),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_NO_WORD}?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: family for names, family in _FAMILIES for name in names.split()
}
"""Every known value of `tokenizer.ggml.pre`."""
