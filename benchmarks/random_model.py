"""A GGUF file with the shape of a well-known model, or of its first layers, and random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.loader.known_models import KNOWN_MODELS, KnownModel
from localkv.loader.metadata import Metadata
from localkv.loader.quantised_format import tensor_format
from localkv.loader.synthetic import constant, random_rows
from localkv.loader.weights import listed_tensors

LLAMA_1B = replace(
    KNOWN_MODELS["llama-1b"],
    name="llama-1.1b",
    n_vocab=32000,
    keys={**KNOWN_MODELS["llama-1b"].keys, "attention.layer_norm_rms_epsilon": 1e-5},
)
"""1.1 billion weights: Llama 3.2's layers and Llama 2's vocabulary."""


def shape_of(name: str) -> KnownModel:
    """The shape that "NAME", "NAME@LAYERS" or "NAME@LAYERSxEXPERTS" says: a known one, or one cut
    to its first layers and experts."""
    name, _, size = name.partition("@")
    known = LLAMA_1B if name == LLAMA_1B.name else KNOWN_MODELS[name]
    n_layers, _, n_experts = size.partition("x")
    if n_experts:
        known = replace(known, keys={**known.keys, "expert_count": int(n_experts)})
    return first_layers(known, int(n_layers)) if n_layers else known


def first_layers(shape: KnownModel, n_layers: int) -> KnownModel:
    """The shape cut to its first layers."""
    most = shape.keys["block_count"]
    keys = {
        key: value[:n_layers] if isinstance(value, list) and len(value) == most else value
        for key, value in shape.keys.items()
    }
    shared = "attention.shared_kv_layers"
    if shared in keys:  # about as many of the layers as before; the last that doesn't sees all
        has_window = keys["attention.sliding_window_pattern"]
        n_shared = keys[shared] * n_layers // most
        own = (n for n in range(n_layers - n_shared, n_layers) if not has_window[n - 1])
        keys[shared] = n_layers - next(own, n_layers)
    return replace(shape, keys={**keys, "block_count": n_layers})


def write_model(path: Path, shape: KnownModel, type_name: str, *, has_words: bool = False) -> None:
    """Matrices in a type, except for those that llama-quantize keeps in another.

    Args:
        has_words: each token is a word, so that a server can send it; else there is no vocabulary.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in shape.keys.items():
        _add_key(writer, f"{shape.architecture}.{key}", value)
    writer.add_vocab_size(shape.n_vocab)
    if has_words:
        _add_words(writer, shape.n_vocab)
    else:
        writer.add_tokenizer_model("no_vocab")
    prefixed = {f"{shape.architecture}.{key}": value for key, value in shape.keys.items()}
    shapes = {"token_embd.weight": (shape.n_vocab, shape.keys["embedding_length"])}
    facts = Facts(shape.architecture, shape.name, Metadata(prefixed), {**shapes, **shape.tensors})
    for name, size in listed_tensors(ARCHS[shape.architecture](facts), shape.has):
        fmt = tensor_format(name, size, type_name, is_output=name == shape.output_matrix)
        if (value := constant(name, size)) is not None:
            writer.add_tensor(name, np.full(size, value, np.float32))
            continue
        rows = random_rows(fmt, int(np.prod(size[:-1])), size[-1])
        kind = gguf.GGMLQuantizationType[fmt.name.upper()]
        if fmt.name == "f32":
            writer.add_tensor(name, rows.view(np.float32).reshape(size))
        else:
            writer.add_tensor(name, rows.reshape(*size[:-1], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """A vocabulary of SentencePiece: <unk>, <s>, </s>, all bytes, and words."""
    special = ["<unk>", "<s>", "</s>"]
    all_bytes = [f"<0x{value:02X}>" for value in range(256)]
    words = [f"\u2581w{number}" for number in range(n_vocab - len(special) - len(all_bytes))]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    types += [kinds.BYTE] * len(all_bytes) + [kinds.NORMAL] * len(words)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *all_bytes, *words])
    writer.add_token_scores([0.0] * n_vocab)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
