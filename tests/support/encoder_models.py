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

from support.random_model import RandomModel

N_EMBD, N_HEADS, N_FF, N_LAYERS, N_POSITIONS = 64, 4, 96, 3, 128
GAIN = 1.0
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
        texts: keys with the whole name.
    """

    arch: str
    keys: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def matrix(self, name: str, n_out: int, n_in: int, *, bias: bool = False) -> None:
        values = self.rng.standard_normal((n_out, n_in)) * GAIN / np.sqrt(n_in)
        self.tensors[f"{name}.weight"] = values.astype(np.float16).astype(np.float64)
        if bias:
            self.vector(f"{name}.bias", n_out, centre=0.0)

    def stack(self, name: str, n: int, n_out: int, n_in: int) -> None:
        """Matrices of experts."""
        values = self.rng.standard_normal((n, n_out, n_in)) * GAIN / np.sqrt(n_in)
        self.tensors[f"{name}.weight"] = values.astype(np.float16).astype(np.float64)

    @property
    def n_layers(self) -> int:
        return int(self.keys.get("block_count", N_LAYERS))

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
        for name, text in self.texts.items():
            writer.add_string(name, text)
        _add_vocabulary(writer)
        for name, values in self.tensors.items():
            data = values.astype(np.float32)
            if (
                data.ndim == 1
                or name.startswith(("position_embd", "token_types"))
                or "ffn_gate_inp" in name
            ):
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
    ids = {"padding": 0, "unknown": 1, "bos": 2, "cls": 2, "seperator": 3, "mask": 4}
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)


def _sums_normed(
    model: Encoder,
    *,
    gated: bool = False,
    biased: bool = True,
    fused: bool = False,
    experts: tuple[int, ...] = (),
    second_norm: bool = False,
    qk_norm: bool = False,
) -> Encoder:
    """BERT's tensors, but for positions.

    Args:
        gated: blocks have a gate.
        biased: matrices have biases.
        fused: q, k and v are one tensor.
        experts: layers with 4 of them, without biases.
        second_norm: attention's sum is normed twice.
        qk_norm: q and k are normed, all heads at once.
    """
    model.matrix("token_embd", N_VOCAB, N_EMBD)
    model.matrix("token_types", 2, N_EMBD)
    model.norm("token_embd_norm")
    for i in range(N_LAYERS):
        at = f"blk.{i}."
        for name in ("attn_qkv",) if fused else ("attn_q", "attn_k", "attn_v"):
            model.matrix(at + name, (3 if fused else 1) * N_EMBD, N_EMBD, bias=biased)
        if qk_norm:
            model.norm(at + "attn_q_norm")
            model.norm(at + "attn_k_norm")
        model.matrix(at + "attn_output", N_EMBD, N_EMBD, bias=biased)
        model.norm(at + "attn_output_norm")
        if second_norm:
            model.norm(at + "attn_norm_2")
        if i in experts:
            model.matrix(at + "ffn_gate_inp", 4, N_EMBD)
            model.stack(at + "ffn_up_exps", 4, N_FF, N_EMBD)
            model.stack(at + "ffn_down_exps", 4, N_EMBD, N_FF)
        else:
            if gated:
                model.matrix(at + "ffn_gate", N_FF, N_EMBD)
            model.matrix(at + "ffn_up", N_FF, N_EMBD, bias=biased)
            model.matrix(at + "ffn_down", N_EMBD, N_FF, bias=biased)
        model.norm(at + "layer_output_norm")
    return model


def _inputs_normed(
    model: Encoder,
    *,
    post_norms: bool = False,
    fused: bool = False,
    n_kv_heads: int = N_HEADS,
    final: str = "output_norm",
) -> Encoder:
    """A causal model's tensors.

    Args:
        post_norms: there are norms after both blocks, and of q and k.
        fused: q, k and v are one tensor, gate and up another.
        final: the last norm's.
    """
    kv = n_kv_heads * N_EMBD // N_HEADS
    model.matrix("token_embd", N_VOCAB, N_EMBD)
    model.norm(final, bias=False)
    for i in range(model.n_layers):
        at = f"blk.{i}."
        model.norm(at + "attn_norm", bias=False)
        model.norm(at + "ffn_norm", bias=False)
        if fused:
            model.matrix(at + "attn_qkv", N_EMBD + 2 * kv, N_EMBD)
            model.matrix(at + "ffn_up", 2 * N_FF, N_EMBD)
        else:
            model.matrix(at + "attn_q", N_EMBD, N_EMBD)
            model.matrix(at + "attn_k", kv, N_EMBD)
            model.matrix(at + "attn_v", kv, N_EMBD)
            model.matrix(at + "ffn_gate", N_FF, N_EMBD)
            model.matrix(at + "ffn_up", N_FF, N_EMBD)
        model.matrix(at + "attn_output", N_EMBD, N_EMBD)
        model.matrix(at + "ffn_down", N_EMBD, N_FF)
        if post_norms:
            for name in ("attn_q_norm", "attn_k_norm"):
                model.vector(f"{at}{name}.weight", N_EMBD // N_HEADS)
            model.norm(at + "post_attention_norm", bias=False)
            model.norm(at + "post_ffw_norm", bias=False)
    return model


RMS = {"attention.layer_norm_rms_epsilon": 1e-6}


def bert() -> Encoder:
    model = _sums_normed(Encoder("bert", {"pooling_type": 2}))
    model.matrix("position_embd", N_POSITIONS, N_EMBD)
    return model


def nomic_bert() -> Encoder:
    keys = {"pooling_type": 1, "rope.freq_base": 1000.0}
    return _sums_normed(Encoder("nomic-bert", keys), gated=True, biased=False, fused=True)


def nomic_bert_moe() -> Encoder:
    keys = {"moe_every_n_layers": 2, "expert_count": 4, "expert_used_count": 2}
    return _sums_normed(Encoder("nomic-bert-moe", keys), fused=True, experts=(1,))


def jina_bert_v2() -> Encoder:
    return _sums_normed(Encoder("jina-bert-v2"), gated=True)


def jina_bert_v2_code() -> Encoder:
    """The models for code: norms of q and k, another one of attention's sum, gate and up in one
    tensor."""
    model = _sums_normed(Encoder("jina-bert-v2"), second_norm=True, qk_norm=True)
    for i in range(N_LAYERS):
        model.matrix(f"blk.{i}.ffn_up", 2 * N_FF, N_EMBD, bias=True)
    return model


def jina_bert_v3() -> Encoder:
    return _sums_normed(Encoder("jina-bert-v3"), fused=True)


def modern_bert() -> Encoder:
    keys = {
        "attention.sliding_window": 17,
        "rope.freq_base": 160000.0,
        "block_count": 5,
        "pooling_type": 2,
    }
    model = _inputs_normed(Encoder("modern-bert", keys), fused=True)
    model.norm("token_embd_norm", bias=False)
    del model.tensors["blk.0.attn_norm.weight"]
    return model


def modern_bert_silu() -> Encoder:
    keys = {
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base_swa": 500.0,
        "hidden_activation": "silu",
    }
    model = _inputs_normed(Encoder("modern-bert", keys), fused=True)
    model.norm("token_embd_norm", bias=False)
    return model


def gemma_embedding() -> Encoder:
    keys = {
        **RMS,
        "attention.sliding_window": 20,
        "attention.head_count_kv": 1,
        "rope.freq_base": 1e6,
        "block_count": 7,
        "pooling_type": 1,
    }
    return _inputs_normed(Encoder("gemma-embedding", keys), post_norms=True, n_kv_heads=1)


def gemma_embedding_dense() -> Encoder:
    """Two matrices follow the pooling."""
    model = gemma_embedding()
    model.keys |= {"dense_2_feat_in": N_EMBD, "dense_2_feat_out": N_FF}
    model.keys |= {"dense_3_feat_in": N_FF, "dense_3_feat_out": N_EMBD}
    model.matrix("dense_2", N_FF, N_EMBD)
    model.matrix("dense_3", N_EMBD, N_FF)
    return model


def eurobert() -> Encoder:
    keys = {**RMS, "attention.head_count_kv": 2, "pooling_type": 1}
    return _inputs_normed(Encoder("eurobert", keys), n_kv_heads=2)


def neo_bert() -> Encoder:
    return _inputs_normed(Encoder("neo-bert", RMS), fused=True, final="enc.output_norm")


def llama_embed() -> Encoder:
    keys = {**RMS, "attention.head_count_kv": 2}
    return _inputs_normed(Encoder("llama-embed", keys), n_kv_heads=2)


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "bert": bert,
    "nomic-bert": nomic_bert,
    "nomic-bert-moe": nomic_bert_moe,
    "jina-bert-v2": jina_bert_v2,
    "jina-bert-v2-code": jina_bert_v2_code,
    "jina-bert-v3": jina_bert_v3,
    "modern-bert": modern_bert,
    "modern-bert-silu": modern_bert_silu,
    "gemma-embedding": gemma_embedding,
    "eurobert": eurobert,
    "neo-bert": neo_bert,
    "llama-embed": llama_embed,
}
"""By name."""


def bert_rank() -> Encoder:
    """The head of BGE's rerankers: two matrices with biases."""
    model = bert()
    model.keys["pooling_type"] = 4
    model.matrix("cls", N_EMBD, N_EMBD, bias=True)
    model.matrix("cls.output", 1, N_EMBD, bias=True)
    return model


def bert_classes() -> Encoder:
    """One matrix, of three classes."""
    model = bert()
    model.keys |= {"pooling_type": 4, "classifier.output_labels": ["a", "b", "c"]}
    model.matrix("cls.output", 3, N_EMBD, bias=True)
    return model


def jina_bert_v2_rank() -> Encoder:
    """The head of Jina's reranker v1: the first matrix has one row."""
    model = jina_bert_v2()
    model.keys["pooling_type"] = 4
    model.matrix("cls", 1, N_EMBD, bias=True)
    return model


def modern_bert_rank() -> Encoder:
    """The head of GTE's reranker: the mean is read, and normed."""
    model = modern_bert()
    model.keys["pooling_type"] = 4
    model.matrix("cls", N_EMBD, N_EMBD)
    model.norm("cls.norm", bias=False)
    model.matrix("cls.output", 1, N_EMBD, bias=True)
    return model


def modern_bert_rank_cls() -> Encoder:
    """The first token is read."""
    model = modern_bert_rank()
    model.keys["classifier.pooling_type"] = 2
    return model


DENSE = {"gemma-embedding-dense": gemma_embedding_dense}
RERANKERS: dict[str, Callable[[], Encoder]] = {
    "bert-rank": bert_rank,
    "bert-classes": bert_classes,
    "jina-bert-v2-rank": jina_bert_v2_rank,
    "modern-bert-rank": modern_bert_rank,
    "modern-bert-rank-cls": modern_bert_rank_cls,
}
"""Encoders with a head that scores texts, by name."""


def write_qwen3_rank(path: Path) -> Path:
    """A causal model with a class for yes and one for no."""
    settings = {"pooling_type": 4, "classifier.output_labels": ["yes", "no"]}
    model = RandomModel("qwen3", settings=settings)
    values = np.random.default_rng(1).standard_normal((2, model.n_embd)) / 8
    model.tensors["cls.output.weight"] = values.astype(np.float16).astype(np.float64)
    return model.write(path)


def write_encoder(name: str, path: Path, matrices: GGMLType = GGMLType.F16) -> Path:
    """The file of a model."""
    return (ENCODERS | RERANKERS | DENSE)[name]().write(path, matrices)
