"""Small random encoders, on which every part of the forward pass matters, with a vocabulary.

llama.cpp b11434 (`libllama`, F16 weights, attention not fused) made the embeddings in
`tests/data/llama_cpp_encoders.json` of the files that `write_encoder` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

N_EMBD, N_HEADS, N_FF, N_LAYERS, N_POSITIONS = 64, 4, 96, 3, 128
WORDS = ("the", "fox", "ran", "home", "red", "dr", "##um", "was", "lost", ".", ",", "un")
TOKENS = (
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *WORDS,
    *(chr(ord("a") + i) for i in range(26)),
    *(f"##{chr(ord('a') + i)}" for i in range(26)),
    *("é", "я", "##я", "你", "好", "7", "##7"),
)
N_VOCAB = len(TOKENS)
TEXTS = (
    [(i * 37 + 11) % N_VOCAB for i in range(40)],
    [2, 6, 9, 3],
    [(i * 53 + 5) % N_VOCAB for i in range(100)],
)
"""Tokens of three texts."""
SHOWN = [0, 3, 17, 39, 40, 43, 94, 143]
"""Tokens whose embeddings are stored, counted through all texts."""


def wordpieces() -> list[str]:
    """The vocabulary as files have it: words begin with a space, what goes on with a word doesn't,
    and control tokens are as they are."""
    return [
        token if token[0] == "[" else token[2:] if token.startswith("##") else "▁" + token
        for token in TOKENS
    ]


@dataclass
class Encoder:
    """Weights and keys; `write` makes a file of them.

    Attributes:
        keys: without the architecture's prefix.
        tensors: float64, by name.
    """

    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def matrix(self, name: str, n_out: int, n_in: int, *, bias: bool = False) -> None:
        values = self.rng.standard_normal((n_out, n_in)) * 1.5 / np.sqrt(n_in)
        self.tensors[f"{name}.weight"] = values.astype(np.float16).astype(np.float64)
        if bias:
            self.vector(f"{name}.bias", n_out, centre=0.0)

    def vector(self, name: str, n: int, centre: float = 1.0) -> None:
        values = centre + 0.3 * self.rng.standard_normal(n)
        self.tensors[name] = values.astype(np.float32).astype(np.float64)

    def norm(self, name: str, *, bias: bool = True) -> None:
        self.vector(f"{name}.weight", N_EMBD)
        if bias:
            self.vector(f"{name}.bias", N_EMBD, centre=0.0)

    def key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def all_keys(self) -> dict[str, Any]:
        """Without the architecture's prefix."""
        return {
            "block_count": N_LAYERS,
            "context_length": N_POSITIONS,
            "embedding_length": N_EMBD,
            "feed_forward_length": N_FF,
            "attention.head_count": N_HEADS,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.causal": False,
            **self.keys,
        }

    def write(self, path: Path, matrices: GGMLType = GGMLType.F16) -> Path:
        writer = gguf.GGUFWriter(path, self.arch)
        for name, value in self.all_keys().items():
            _add(writer, self.key(name), value)
        _add_vocabulary(writer)
        for name, values in self.tensors.items():
            data = values.astype(np.float32)
            if data.ndim == 1 or name.startswith(("position_embd", "token_types")):
                writer.add_tensor(name, data)
                continue
            writer.add_tensor(name, gguf.quants.quantize(data, matrices), raw_dtype=matrices)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    adders[type(value)](name, value)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    types = [
        gguf.TokenType.CONTROL if token[0] == "[" else gguf.TokenType.NORMAL for token in TOKENS
    ]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(wordpieces())
    writer.add_token_types(types)
    writer.add_token_type_count(2)
    ids = {"padding": 0, "unknown": 1, "cls": 2, "seperator": 3, "mask": 4}
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)


def bert() -> Encoder:
    model = Encoder("bert", {"pooling_type": 2})
    model.matrix("token_embd", N_VOCAB, N_EMBD)
    model.matrix("position_embd", N_POSITIONS, N_EMBD)
    model.matrix("token_types", 2, N_EMBD)
    model.norm("token_embd_norm")
    for i in range(N_LAYERS):
        at = f"blk.{i}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            model.matrix(at + name, N_EMBD, N_EMBD, bias=True)
        model.norm(at + "attn_output_norm")
        model.matrix(at + "ffn_up", N_FF, N_EMBD, bias=True)
        model.matrix(at + "ffn_down", N_EMBD, N_FF, bias=True)
        model.norm(at + "layer_output_norm")
    return model


ENCODERS: dict[str, Callable[[], Encoder]] = {"bert": bert}
"""By name."""


def write_encoder(name: str, path: Path, matrices: GGMLType = GGMLType.F16) -> Path:
    """The file of a model."""
    return ENCODERS[name]().write(path, matrices)
