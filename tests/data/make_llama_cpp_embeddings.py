"""Write llama_cpp_embeddings.json: the embeddings that llama.cpp makes, pooled by mean and last.

    pip install llama-cpp-python==0.3.36
    python make_llama_cpp_embeddings.py models/tales-4M-F16.gguf [MORE.gguf ...]

K and V are float32 and attention is not fused, so that nothing but weights and products is rounded.
The first model reads texts, the others tokens of a formula. A case of the output:

    file       its name
    ids        the tokens
    pooling    "mean" or "last"
    norm       the Euclidean norm of the vector
    step       the distance of the components that are noted
    parts      these components of the vector, divided by the norm, 6 decimals
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from pathlib import Path

import llama_cpp.llama_cpp as lib

TEXTS = ("Once upon a time", "Mia the fox lost her red drum, and Ruth found it beside the path.")
POOLINGS = {"mean": lib.LLAMA_POOLING_TYPE_MEAN, "last": lib.LLAMA_POOLING_TYPE_LAST}
N_PARTS = 16


def token_ids(model: ctypes.c_void_p, text: str) -> list[int]:
    """With the special tokens that the model wants."""
    data, out = text.encode(), (lib.llama_token * 256)()
    vocab = lib.llama_model_get_vocab(model)
    return list(out[: lib.llama_tokenize(vocab, data, len(data), out, 256, True, False)])


def formula_ids(model: ctypes.c_void_p, n: int) -> list[int]:
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    return [(i * 7919 + 13) % n_vocab for i in range(n)]


def embedding(model: ctypes.c_void_p, ids: list[int], pooling: int) -> list[float]:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 2
    params.n_outputs_max = 512
    params.embeddings, params.pooling_type = True, pooling
    params.type_k = params.type_v = lib.GGML_TYPE_F32
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert lib.llama_decode(context, batch) == 0
    vector = lib.llama_get_embeddings_seq(context, 0)[: lib.llama_model_n_embd(model)]
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    return list(vector)


def cases(path: Path, reads_text: bool) -> list[dict]:
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    texts = [token_ids(model, text) for text in TEXTS] if reads_text else [formula_ids(model, 40)]
    found = []
    for ids in texts:
        for name, pooling in POOLINGS.items():
            vector = embedding(model, ids, pooling)
            norm = math.sqrt(sum(x * x for x in vector))
            step = max(1, len(vector) // N_PARTS)
            parts = [round(x / norm, 6) for x in vector[::step]]
            case = {"file": path.name, "ids": ids, "pooling": name}
            found.append({**case, "norm": float(f"{norm:.7g}"), "step": step, "parts": parts})
    lib.llama_model_free(model)
    return found


def main(paths: list[str]) -> None:
    silent = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    found = [case for i, path in enumerate(paths) for case in cases(Path(path), i == 0)]
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in found)
    Path(__file__).with_name("llama_cpp_embeddings.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
