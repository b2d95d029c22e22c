"""Write llama_cpp_dense.json: llama.cpp's logits of the models of tests/support/own_models.py.

    pip install llama-cpp-python==0.3.36 gguf
    python make_llama_cpp_dense.py

By the model's name: float32 [positions shown, n_vocab], as base64.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import make_llama_cpp_experts as experts

from support.own_models import IDS, N_VOCAB, OWN, SHOWN, write_own


def main() -> None:
    if "-v" not in sys.argv:
        silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    experts.IDS, experts.N_VOCAB = IDS, N_VOCAB
    stored = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in OWN:
            rows = experts.logits(write_own(name, Path(folder) / f"{name}.gguf"))
            assert np.isfinite(rows).all(), name
            stored[name] = base64.b64encode(rows[list(SHOWN)].tobytes()).decode()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(data)}" for name, data in stored.items())
    Path(__file__).with_name("llama_cpp_dense.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
