"""Write llama_cpp_perplexity.json: llama.cpp's perplexity of the model that ships, on some stories.

Run it after the model was trained again, where llama-cpp-python is installed:

    python tests/data/make_llama_cpp_perplexity.py models/tales-4M-F16.gguf

It does what `llama-perplexity -c N` does, on llama.cpp's own tokens and logits: chunks of N tokens,
each a new sequence that starts with BOS, the second half of each scored. And what it does with
`--kl-divergence`, against an f16 cache, for caches of packed types. The stories come from the
generator of the training data and are kept in the fixture.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import random
import sys
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))
from corpus import make_document

N_STORIES = 14
N_CTX = 256
CACHES = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"))
GGML_TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}


def stories() -> str:
    rng = random.Random(2026)
    texts = [make_document(rng, "story", 256).text for _ in range(N_STORIES)]
    return "\n".join(text.removesuffix("</s>") for text in texts)


def tokenize(vocab: ctypes.c_void_p, text: str) -> list[int]:
    data = text.encode()
    ids = (llama_cpp.llama_token * (len(data) + 1))()
    n = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), True, False)
    return list(ids[:n])


def log_probs(model: ctypes.c_void_p, chunk: list[int], type_k: str, type_v: str) -> np.ndarray:
    """The log-probabilities of a chunk's second half, but for its last token, in float64."""
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
    params.n_threads = params.n_threads_batch = 1
    params.type_k, params.type_v = GGML_TYPES[type_k], GGML_TYPES[type_v]
    params.flash_attn_type = 1
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(chunk), 0, 1)
    batch.n_tokens = len(chunk)
    for i, token in enumerate(chunk):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(context, batch) == 0
    rows = range(N_CTX // 2, N_CTX - 1)
    pointers = [llama_cpp.llama_get_logits_ith(context, i) for i in rows]
    logits = np.stack([np.ctypeslib.as_array(p, (n_vocab,)).astype(np.float64) for p in pointers])
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def measure(model: ctypes.c_void_p, chunks: list[list[int]], type_k: str, type_v: str) -> dict:
    nll, kld, same = [], [], []
    for chunk in chunks:
        base = log_probs(model, chunk, "f16", "f16")
        q = log_probs(model, chunk, type_k, type_v)
        targets = chunk[N_CTX // 2 + 1 :]
        nll += (-q[np.arange(len(targets)), targets]).tolist()
        kld += (np.exp(base) * (base - q)).sum(1).tolist()
        same += (base.argmax(1) == q.argmax(1)).tolist()
    mean = sum(nll) / len(nll)
    variance = sum(x * x for x in nll) / len(nll) - mean**2
    ppl = math.exp(mean)
    return {
        "type_k": type_k,
        "type_v": type_v,
        "ppl": ppl,
        "ppl_error": ppl * math.sqrt(variance / (len(nll) - 1)),
        "kld": sum(kld) / len(kld),
        "same_top": sum(same) / len(same),
    }


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def main() -> None:
    path = Path(sys.argv[1])
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    text = stories()
    ids = tokenize(vocab, text)
    chunks = [ids[at : at + N_CTX] for at in range(0, len(ids) - N_CTX + 1, N_CTX)]
    for chunk in chunks:
        chunk[0] = llama_cpp.llama_vocab_bos(vocab)
    result = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "llama_cpp_python": llama_cpp.__version__,
        "n_ctx": N_CTX,
        "n_tokens": len(ids),
        "results": [measure(model, chunks, *types) for types in CACHES],
        "text": text,
    }
    target = Path(__file__).with_name("llama_cpp_perplexity.json")
    target.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["results"]:
        print(row)


if __name__ == "__main__":
    main()
