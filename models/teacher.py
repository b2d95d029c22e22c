"""A trained model, read from its GGUF file, whose predictions a smaller one learns."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from network import Network, Shape
from tokenizer import Tokenizer


def load_teacher(path: Path, tokenizer: Tokenizer) -> Network:
    """The network of a file that `export_gguf.py` wrote, for predictions alone.

    Raises:
        ValueError: its tokenizer is another one.
    """
    reader = gguf.GGUFReader(path)
    pieces = [tokenizer.processor.id_to_piece(index) for index in range(tokenizer.size)]
    if reader.fields["tokenizer.ggml.tokens"].contents() != pieces:
        raise ValueError(f"{path} has another tokenizer")
    network = Network(_shape(reader))
    state = {
        tensor.name: torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).copy()
        )
        for tensor in reader.tensors
    }
    network.load_state_dict(state)
    return network.requires_grad_(False)


def _shape(reader: gguf.GGUFReader) -> Shape:
    def number(key: str) -> float:
        value: float = reader.fields[f"llama.{key}"].contents()
        return value

    return Shape(
        vocabulary=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        width=int(number("embedding_length")),
        layers=int(number("block_count")),
        heads=int(number("attention.head_count")),
        kv_heads=int(number("attention.head_count_kv")),
        head_width=int(number("rope.dimension_count")),
        hidden=int(number("feed_forward_length")),
        context=int(number("context_length")),
        rope_base=number("rope.freq_base"),
        norm_epsilon=number("attention.layer_norm_rms_epsilon"),
    )
