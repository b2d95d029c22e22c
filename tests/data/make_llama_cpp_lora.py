"""Write llama_cpp_lora.json: llama.cpp's logits of small models with adapters.

    pip install llama-cpp-python==0.3.36 gguf
    python make_llama_cpp_lora.py

By the model's name: float32 [positions shown, n_vocab], as base64. tests/support/adapters.py writes
models and adapters.
"""

from __future__ import annotations

import base64
import ctypes
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.adapters import ADAPTED, write_adapted
from support.own_models import IDS, N_VOCAB, SHOWN


def logits(model: Path, adapters: list[tuple[Path, float]]) -> np.ndarray:
    """float32 [ids, n_vocab]."""
    of_model = lib.llama_model_default_params()
    of_model.use_extra_bufts = False  # they would multiply other types
    loaded = lib.llama_model_load_from_file(str(model).encode(), of_model)
    of_context = lib.llama_context_default_params()
    of_context.n_ctx = of_context.n_batch = 256
    context = lib.llama_init_from_model(loaded, of_context)
    found = [lib.llama_adapter_lora_init(loaded, str(path).encode()) for path, _ in adapters]
    n = len(adapters)
    scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
    pointers = (lib.llama_adapter_lora_p_ctypes * n)(*found)
    assert lib.llama_set_adapters_lora(context, pointers, n, scales) == 0
    batch = lib.llama_batch_init(len(IDS), 0, 1)
    batch.n_tokens = len(IDS)
    for i, token in enumerate(IDS):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert lib.llama_decode(context, batch) == 0
    rows = np.ctypeslib.as_array(lib.llama_get_logits(context), (len(IDS), N_VOCAB)).copy()
    lib.llama_free(context)
    lib.llama_model_free(loaded)
    return rows


def main() -> None:
    silent = lib.llama_log_callback(lambda level, text, data: None)
    if "-v" not in sys.argv:
        lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    stored = {}
    for name in ADAPTED:
        with tempfile.TemporaryDirectory() as folder:
            rows = logits(*write_adapted(name, Path(folder)))
        assert np.isfinite(rows).all(), name
        stored[name] = base64.b64encode(rows[list(SHOWN)].tobytes()).decode()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(data)}" for name, data in stored.items())
    Path(__file__).with_name("llama_cpp_lora.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
