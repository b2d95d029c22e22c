"""Write llama_cpp_experts.json: llama.cpp's logits of the models of tests/support/expert_models.py.

    pip install llama-cpp-python==0.3.36 gguf
    python make_llama_cpp_experts.py

By the model's name: float32 [positions shown, n_vocab], as base64.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.expert_models import EXPERT_MODELS, IDS, N_VOCAB, SHOWN


def logits(path: Path, **changed: Any) -> np.ndarray:
    """float32 [len(IDS), N_VOCAB], through an f16 cache, in one batch.

    Args:
        changed: fields of `llama_context_params`.
    """
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model, path.name
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 2
    params.n_outputs_max = 512
    for name, value in changed.items():
        setattr(params, name, value)
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(len(IDS), 0, 1)
    batch.n_tokens = len(IDS)
    for i, token in enumerate(IDS):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, True
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert lib.llama_decode(context, batch) == 0
    n = len(IDS) * N_VOCAB
    found = np.array(lib.llama_get_logits(context)[:n], np.float32).reshape(-1, N_VOCAB)
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return found


def main() -> None:
    if "-v" not in sys.argv:
        silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    stored = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in EXPERT_MODELS.items():
            rows = logits(model.write(Path(folder) / f"{name}.gguf"))
            assert np.isfinite(rows).all(), name
            stored[name] = base64.b64encode(rows[list(SHOWN)].tobytes()).decode()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(data)}" for name, data in stored.items())
    Path(__file__).with_name("llama_cpp_experts.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
