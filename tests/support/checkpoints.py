"""Small checkpoints as transformers writes them, made without it: tests/data/converted.json has
configurations, and names, types and shapes of tensors; values are made of their names.

`tests/data/make_converted.py` makes that file, and llama.cpp's conversions of these checkpoints.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors
from tokenizers import pre_tokenizers as steps

from support.paths import TESTS

DATA = TESTS / "data" / "converted.json"
N_VOCAB = 600
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_TEXT = (
    "the and of to in is that it for as with on be at by this have from or one had but not what"
    " all were when we there can an your which their said if do will each about how up out them"
    " then 12 123 don't I'll Hello World é ü привет 你好 number letter space model token"
    " cache weight"
)
WORDS = _TEXT.split()

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START, _SLASHED = r"[^\r\n\p{L}\p{N}]?", _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)


def _cased(ending: str, digits: str) -> str:
    words = f"{_START}{_UPPER}*{_LOWER}+{ending}|{_START}{_UPPER}+{_LOWER}*{ending}"
    return f"{words}|{digits}|{_SLASHED}"


def _split(*regexes: str) -> steps.PreTokenizer:
    parts = [steps.Split(Regex(regex), "isolated") for regex in regexes]
    return steps.Sequence([*parts, steps.ByteLevel(add_prefix_space=False, use_regex=False)])


PUBLISHED: dict[str, Callable[[], steps.PreTokenizer]] = {
    "llama-bpe": lambda: _split(rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"),
    "qwen2": lambda: _split(rf"{_WORD}|\p{{N}}|{_REST}"),
    "qwen35": lambda: _split(
        _WORD.replace(r"\p{L}+", r"[\p{L}\p{M}]+")
        + r"|\p{N}|"
        + _REST.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
    ),
    "gpt-4o": lambda: _split(_cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")),
    "tekken": lambda: _split(_cased("", r"\p{N}")),
    "gpt-2": lambda: steps.ByteLevel(add_prefix_space=False),
    "smollm": lambda: steps.Sequence(
        [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)]
    ),
    "dbrx": lambda: _split(rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"),
    "glm4": lambda: _split(rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"),
    "deepseek-v3": lambda: _split(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Pre-tokenizers as they stand in the tokenizer.json of published models, by llama.cpp's names."""
WITHOUT_MERGES = ("llama-bpe", "tekken", "glm4")
"""Pre-tokenizers of models whose `ignore_merges` is set."""


def byte_level(
    pre: str, specials: Mapping[str, str], *, adds: str = "", nfc: bool = False
) -> Tokenizer:
    """A byte-level BPE of the words above.

    Args:
        specials: texts of special tokens by their part, "bos" and others.
        adds: the part that comes before a text.
        nfc: it composes characters first.
    """
    alphabet = sorted(steps.ByteLevel.alphabet())
    vocab, merges = {text: i for i, text in enumerate(alphabet)}, []
    cut = steps.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in [*WORDS, *(f" {word}" for word in WORDS)]:
        ((written, _),) = cut.pre_tokenize_str(word)
        for end in range(2, len(written) + 1):
            left, whole = written[: end - 1], written[:end]
            if whole not in vocab:
                merges.append((left, whole[-1]))
                vocab[whole] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in WITHOUT_MERGES))
    tokenizer.pre_tokenizer = PUBLISHED[pre]()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(specials.values())
        ]
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if adds:
        first = specials[adds]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A",
            pair=f"{first} $A {first} $B",
            special_tokens=[(first, tokenizer.token_to_id(first))],
        )
    return tokenizer


def word_pieces() -> Tokenizer:
    """BERT's: lower case, `##` before what continues a word."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(i) for i in range(33, 127) if not chr(i).isupper()] + list("éüпривет你好")
    words = [word.lower() for word in WORDS if word.isalpha()]
    texts += [*letters, *(f"##{letter}" for letter in letters), *words]
    vocab = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = steps.BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in texts[:5]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes((value & 127 | 128,)), value >> 7
    return out + bytes((value,))


def sentencepiece_model(heads: list[tuple[str, int]], *, adds_space: bool = True) -> bytes:
    """A SentencePiece BPE: special tokens, bytes, and the words above, the first ones best."""
    pieces = [(text, 0.0, kind) for text, kind in heads]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    texts = ["▁", *(chr(i) for i in range(33, 127)), *"éüпривет你好"]
    for word in (f"▁{word}" for word in WORDS):
        texts += [word[:end] for end in range(2, len(word) + 1)]
    seen = dict.fromkeys(texts)
    pieces += [(text, -float(i), 1) for i, text in enumerate(seen)]
    data = b"".join(
        _field(
            1,
            _field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + _varint(kind),
        )
        for text, score, kind in pieces[: N_VOCAB - 8]
    )
    unk = next(i for i, (_, kind) in enumerate(heads) if kind == 2)
    ids = b"".join(
        _varint(number << 3) + _varint(i)
        for number, i in (
            (40, unk),
            (41, [text for text, _ in heads].index("<s>")),
            (42, [text for text, _ in heads].index("</s>")),
        )
    )
    trainer = b"\x18\x02" + _varint(35 << 3) + b"\x01" + ids
    return data + _field(2, trainer) + _field(3, b"\x18" + bytes((adds_space,)) + b"\x20\x00")


HEADS = {
    "llama": [("<unk>", 2), ("<s>", 3), ("</s>", 3)],
    "gemma": [("<pad>", 3), ("</s>", 3), ("<s>", 3), ("<unk>", 2)],
}


def write_tokenizer(folder: Path, facts: Mapping[str, Any]) -> None:
    """A tokenizer's files, by what converted.json says of it."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    kind = facts["kind"]
    if kind == "sentencepiece":
        heads = HEADS[facts["heads"]]
        model = sentencepiece_model(heads, adds_space=facts["heads"] == "llama")
        (folder / "tokenizer.model").write_bytes(model)
        added = {str(i): {"content": text, "special": True} for i, (text, _) in enumerate(heads)}
        added[str(N_VOCAB - 1)] = {"content": "<extra>", "special": False}
        settings = {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": added}
        settings |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        settings |= {"add_bos_token": True, "add_eos_token": False, "chat_template": TEMPLATE}
    elif kind == "wordpiece":
        word_pieces().save(str(folder / "tokenizer.json"))
        parts = ("unk", "pad", "cls", "sep", "mask")
        settings |= {f"{part}_token": f"[{part.upper()}]" for part in parts}
        (folder / "modules.json").write_text(
            json.dumps([{"idx": 1, "path": "1_Pooling", "type": "a.Pooling"}])
        )
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    else:
        specials = facts["specials"]
        tokenizer = byte_level(facts["pre"], specials, adds=facts["adds"], nfc=facts["nfc"])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings |= {f"{part}_token": text for part, text in specials.items() if len(part) == 3}
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def values(name: str, dtype: str, shape: list[int]) -> NDArray[Any]:
    """A tensor's values: norms around 1, matrices that keep activations small."""
    if dtype == "I64":
        return np.zeros(shape, np.int64)
    random = np.random.RandomState(zlib.crc32(name.encode()))  # whose numbers stay the same
    if name.endswith("g_idx"):
        return (random.permutation(shape[0]) // GROUP).astype(np.int32)
    if dtype in ("I32", "U8", "I8", "F8_E4M3"):
        made = random.randint(0, 256, size=(*shape, 4 if dtype == "I32" else 1)).astype(np.uint8)
        if dtype == "F8_E4M3":
            made &= 0xFE  # no NaN
        if name.endswith("_scales"):
            made = made % 8 + np.uint8(116)
        return made.view(np.int32)[..., 0] if dtype == "I32" else made[..., 0]
    numbers = random.standard_normal(shape).astype(np.float32)
    if "scale" in name:
        numbers = np.abs(numbers) / 100 + np.float32(0.001)
        return numbers.astype(np.float16) if dtype == "F16" else _stored(numbers, dtype)
    numbers = 1 + numbers / 10 if len(shape) == 1 else numbers * np.float32(0.08)
    return _stored(numbers, dtype)


def _stored(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "BF16":
        return (np.ascontiguousarray(numbers).view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype({"F16": np.float16, "F32": np.float32}[dtype])


GROUP = 32
"""Columns that share a scale in the checkpoints of codes."""


def with_given(case: Mapping[str, Any], name: str, made: NDArray[Any]) -> NDArray[Any]:
    """What a checkpoint of codes can't have at random: zero points in the middle, and shapes."""
    settings = case["config"].get("quantization_config", {})
    if name.endswith("g_idx") and not settings.get("desc_act"):
        return np.arange(len(made), dtype=np.int32) // GROUP
    if name.endswith("qzeros") and settings.get("sym"):
        return np.full_like(made, {4: 0x77777777, 8: 0x7F7F7F7F}[settings["bits"]])
    if name.endswith("weight_shape"):
        packed = case["tensors"][name.replace("_shape", "_packed")][1]
        return np.array([packed[0], packed[1] * 8], np.int64)
    return made


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Tensors by name, as safetensors' types and arrays."""
    header, end = {}, 0
    for name, (dtype, array) in tensors.items():
        offsets = [end, end + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def write_checkpoint(folder: Path, case: Mapping[str, Any]) -> Path:
    """A checkpoint of converted.json, in a new folder; every other one in two files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 40}')
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags:\n- tiny\n---\n# Tiny\n")
    write_tokenizer(folder, case["tokenizer"])
    tensors = {
        name: (dtype, with_given(case, name, values(name, dtype, shape)))
        for name, (dtype, shape) in case["tensors"].items()
    }
    if len(tensors) % 2:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names, half = list(tensors), math.ceil(len(tensors) / 2)
    parts = {"model-00001-of-00002.safetensors": names[:half]}
    parts["model-00002-of-00002.safetensors"] = names[half:]
    for file, part in parts.items():
        write_safetensors(folder / file, {name: tensors[name] for name in part})
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    return folder


def cases() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DATA.read_text())
    return found
