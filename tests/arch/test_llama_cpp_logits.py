"""Architectures without experts that conformance data has none of: llama.cpp's stored logits."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from support.forward import logits, nmse
from support.own_models import IDS, N_VOCAB, OWN, SHOWN, write_own
from support.paths import ROOT

STORED = json.loads((ROOT / "tests" / "data" / "llama_cpp_dense.json").read_text())


@pytest.mark.parametrize("name", OWN)
def test_llama_cpp_logits(name: str, tmp_path: Path) -> None:
    rows = np.frombuffer(base64.b64decode(STORED[name]), np.float32)
    path = write_own(name, tmp_path / "model.gguf")
    for backend in (reference_backend(), cpu_backend()):
        got = logits(path, backend, IDS, "f16", chunk=17)[list(SHOWN)]
        assert nmse(got, rows.reshape(-1, N_VOCAB)) <= 2e-6
