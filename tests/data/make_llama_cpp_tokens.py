"""Write llama_cpp_tokens.json: what llama.cpp generates greedily with the model that ships.

Run it after the model was trained again, where llama-cpp-python is installed:

    python tests/data/make_llama_cpp_tokens.py models/tales-4M-F16.gguf

It uses llama.cpp's own decoding (`llama_decode`, F16 weights, f16 cache), greedy, and records the
ids of the prompt, the ids drawn, and at each step by how much the best logit beats the second.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

PROMPTS = (
    "Once upon a time",
    "One day a little fox named Mia found a red kite.",
    "Tom lived by the river with",
)
N_TOKENS = 100


def greedy(model: ctypes.c_void_p, prompt: str) -> dict:
    vocab = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 512, 512
    params.n_threads = params.n_threads_batch = 2
    context = llama_cpp.llama_init_from_model(model, params)
    text = prompt.encode()
    ids = (llama_cpp.llama_token * 256)()
    n = llama_cpp.llama_tokenize(vocab, text, len(text), ids, 256, True, False)
    prompt_ids = list(ids[:n])
    drawn, margins = [], []
    while len(drawn) < N_TOKENS:
        new = prompt_ids if not drawn else drawn[-1:]
        array = (llama_cpp.llama_token * len(new))(*new)  # a batch does not own its tokens
        batch = llama_cpp.llama_batch_get_one(array, len(new))
        assert llama_cpp.llama_decode(context, batch) == 0
        pointer = llama_cpp.llama_get_logits_ith(context, -1)
        logits = np.ctypeslib.as_array(pointer, (n_vocab,))
        second, best = np.sort(logits)[-2:].tolist()
        drawn.append(int(logits.argmax()))
        margins.append(round(best - second, 4))
        if llama_cpp.llama_vocab_is_eog(vocab, drawn[-1]):
            break
    llama_cpp.llama_free(context)
    return {"prompt": prompt, "prompt_ids": prompt_ids, "ids": drawn, "margins": margins}


@llama_cpp.llama_log_callback
def silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def main() -> None:
    path = Path(sys.argv[1])
    llama_cpp.llama_log_set(silent, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    result = {
        "model": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "llama_cpp_python": llama_cpp.__version__,
        "generations": [greedy(model, prompt) for prompt in PROMPTS],
    }
    target = Path(__file__).with_name("llama_cpp_tokens.json")
    target.write_text(json.dumps(result) + "\n")
    print(f"{target}: {[len(g['ids']) for g in result['generations']]} tokens")


if __name__ == "__main__":
    main()
