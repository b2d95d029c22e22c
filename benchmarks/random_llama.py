"""A GGUF file of a random Llama with 1.1 billion weights in one type."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from localkv.formats import FORMATS
from localkv.loader.synthetic import random_rows

N_LAYERS, N_HEADS, N_KV_HEADS = 16, 32, 8


def write_model(path: Path, name: str, n_vocab: int, n_embd: int, n_ff: int) -> None:
    """Matrices in the type `name`, except for an output matrix as llama-quantize makes it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(N_LAYERS)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(n_embd // N_HEADS)
    writer.add_vocab_size(n_vocab)
    writer.add_tokenizer_model("no_vocab")

    def matrix(tensor: str, kind: str, n_out: int, n_in: int) -> None:
        rows = random_rows(FORMATS[kind], n_out, n_in)
        kinds = gguf.GGMLQuantizationType
        writer.add_tensor(f"{tensor}.weight", rows, raw_dtype=kinds[kind.upper()])

    def norm(tensor: str) -> None:
        writer.add_tensor(f"{tensor}.weight", np.ones(n_embd, np.float32))

    n_kv = n_embd // N_HEADS * N_KV_HEADS
    matrix("token_embd", name, n_vocab, n_embd)
    norm("output_norm")
    matrix("output", "q8_0" if name == "q8_0" else "q6_K", n_vocab, n_embd)
    for layer in range(N_LAYERS):
        at = f"blk.{layer}"
        norm(f"{at}.attn_norm")
        norm(f"{at}.ffn_norm")
        matrix(f"{at}.attn_q", name, n_embd, n_embd)
        matrix(f"{at}.attn_k", name, n_kv, n_embd)
        matrix(f"{at}.attn_v", name, n_kv, n_embd)
        matrix(f"{at}.attn_output", name, n_embd, n_embd)
        matrix(f"{at}.ffn_gate", name, n_ff, n_embd)
        matrix(f"{at}.ffn_up", name, n_ff, n_embd)
        matrix(f"{at}.ffn_down", name, n_embd, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
