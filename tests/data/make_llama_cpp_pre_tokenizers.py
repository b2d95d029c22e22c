"""Write llama_cpp_pre_tokenizers.json: how llama.cpp cuts texts with each of its pre-tokenizers.

Run it after a pre-tokenizer is added, where llama-cpp-python and localkv are installed:

    python tests/data/make_llama_cpp_pre_tokenizers.py

The vocabularies are trained without any pre-tokenizer on texts of the same kind, so their merges
reach over every boundary of words, and ids show where a text was cut.
"""

from __future__ import annotations

import json
import random
import tempfile
import unicodedata
from pathlib import Path

import gguf
import llama_cpp
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from localkv.loader.pre_tokenizers import PRE_TOKENIZERS

WORDS = """
Hello world don't I'LL we'Ve camelCase HTTPServer foo_bar naïve École Привет 漢字かな 中文 안녕 नमस्ते
สวัสดี ကမ္ဘာ កម្ពុជា مرحبا 1 12 123 1234 1234567 0.5 ½ ² ١٢٣ x1y22z333 !!! ... /// ' 's 'S ﬁ Ａ e\u0301
🙂 <sentinel:12> IMGIMGABZ ß $ + <= `~ 豈 ꀀ
"""
SPACES = (" ", "  ", "    x", " " * 9, "\n", "\n\n\n", "!?\n\n", "\r\n", "\t", "\xa0", "\u3000")
PIECES = (*WORDS.split(), *SPACES, "\u2028", "\x0b")
WHOLE = "zyxw"
"""A word that is a token, and no merge makes it."""
BLOCKS = ((0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x900, 0xA00), (0x3000, 0x3100))
N_TEXTS = 32
N_TOKENS = 800
NORMAL, CONTROL, BYTE = 1, 3, 6


def texts(seed: int, n: int) -> list[str]:
    rng = random.Random(seed)

    def piece() -> str:
        if rng.random() < 0.8:
            return rng.choice(PIECES)
        while unicodedata.category(char := chr(rng.randrange(*rng.choice(BLOCKS)))) == "Cn":
            pass
        return char

    return ["".join(piece() for _ in range(rng.randrange(4, 20))) for _ in range(n)]


def vocabulary(of_characters: bool) -> dict[str, list]:
    model, corpus = Tokenizer(BPE()), texts(1, 2000)
    options = {"show_progress": False, "vocab_size": N_TOKENS}
    if of_characters:
        corpus = [text.replace(" ", "▁") for text in corpus]
        options["limit_alphabet"] = 150
    else:
        model.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        options["initial_alphabet"] = ByteLevel.alphabet()
    model.train_from_iterator(corpus, BpeTrainer(**options))
    trained = json.loads(model.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    single = [f"<0x{byte:02X}>" for byte in range(256)] if of_characters else []
    tokens.append(WHOLE)
    return {
        "tokens": [*single, *tokens, "<s>", "</s>"],
        "token_type": [BYTE] * len(single) + [NORMAL] * len(tokens) + [CONTROL] * 2,
        "merges": [" ".join(pair) for pair in trained["merges"]],
    }


def ids_of(path: Path, cases: list[str]) -> list[list[int]]:
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    ids = (llama_cpp.llama_token * 10000)()
    found = []
    for text in cases:
        data = text.encode()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), True, False)
        found.append(list(ids[:n]))
    llama_cpp.llama_model_free(model)
    return found


def main() -> None:
    llama_cpp.llama_backend_init()
    cases = [*texts(2, N_TEXTS), f"({WHOLE}) {WHOLE}1{WHOLE}"]
    vocabularies = {"bytes": vocabulary(False), "characters": vocabulary(True)}
    families: list[dict] = []
    for pre in sorted(PRE_TOKENIZERS):
        kind = "characters" if PRE_TOKENIZERS[pre].of_characters else "bytes"
        values = vocabularies[kind]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "vocabulary.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            writer.add_tokenizer_model("gemma4" if pre == "gemma4" else "gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(values["tokens"])
            writer.add_token_types(values["token_type"])
            writer.add_token_merges(values["merges"])
            writer.add_bos_token_id(len(values["tokens"]) - 2)
            writer.add_eos_token_id(len(values["tokens"]) - 1)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            ids = ids_of(path, cases)
        for family in families:
            if family["vocabulary"] == kind and family["ids"] == ids:
                family["names"].append(pre)
                break
        else:
            families.append({"names": [pre], "vocabulary": kind, "ids": ids})
    result = {"vocabularies": vocabularies, "texts": cases, "families": families}
    target = Path(__file__).with_name("llama_cpp_pre_tokenizers.json")
    target.write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{target}: {len(families)} families, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
