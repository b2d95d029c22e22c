"""Write llama_cpp_rope.json: llama.cpp's logits of the cases of tests/support/rope_options.py.

    pip install llama-cpp-python==0.3.36 gguf
    python make_llama_cpp_rope.py

By the case's name: float32 [positions shown, n_vocab], as base64.
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
sys.path.insert(0, str(Path(__file__).parent))

import make_llama_cpp_experts as experts

from support.own_models import IDS, N_VOCAB, SHOWN
from support.rope_options import CASES, write_case

SCALINGS = ("none", "linear", "yarn")


def main() -> None:
    if "-v" not in sys.argv:
        silent = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(silent, None)
    lib.llama_backend_init()
    experts.IDS, experts.N_VOCAB = IDS, N_VOCAB
    stored = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, options) in CASES.items():
            path = write_case(name, Path(folder) / f"{name}.gguf")
            rows = experts.logits(path, **arguments(options))
            assert np.isfinite(rows).all(), name
            stored[name] = base64.b64encode(rows[list(SHOWN)].tobytes()).decode()
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(data)}" for name, data in stored.items())
    Path(__file__).with_name("llama_cpp_rope.json").write_text(f"{{\n{lines}\n}}\n")


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `llama_context_params`, as llama.cpp's `common/arg.cpp` makes them of options.

    Its flash attention rounds q, so it is off, and the cache is F32.
    """
    found = {**options, "flash_attn_type": 0, "type_k": 0, "type_v": 0}
    if "rope_scaling" in found:
        found["rope_scaling_type"] = SCALINGS.index(found.pop("rope_scaling"))
    if "rope_scale" in found:
        found["rope_freq_scale"] = 1 / found.pop("rope_scale")
    return found


if __name__ == "__main__":
    main()
