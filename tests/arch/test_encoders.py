"""Encoders: llama.cpp's stored embeddings, texts alone and together, and what is refused."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.arch import ARCHS
from localkv.arch.spec import ModelSpec
from localkv.errors import ContextOverflowError, ModelFileError, UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.layer_kinds import check_layers
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.loader.weights import load_model
from support.encoder_models import ENCODERS, N_EMBD, N_POSITIONS, SHOWN, TEXTS, write_encoder
from support.forward import nmse
from support.paths import ROOT

STORED = json.loads((ROOT / "tests" / "data" / "llama_cpp_encoders.json").read_text())
BACKENDS = [reference_backend(), cpu_backend()]


@pytest.fixture(scope="module", params=[*ENCODERS])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return write_encoder(name, tmp_path_factory.mktemp("encoders") / f"{name}.gguf")


def encoded(path: Path, backend: Backend, texts: list[list[int]]) -> np.ndarray:
    model, unused = load_model(path, backend)
    assert unused == []
    return backend.arrays.to_numpy(model.encode(texts))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_llama_cpp_embeddings(encoder: Path, backend: Backend) -> None:
    want = np.frombuffer(base64.b64decode(STORED[encoder.stem]), np.float32).reshape(-1, N_EMBD)
    got = encoded(encoder, backend, TEXTS)[SHOWN]
    assert nmse(got, want) <= 2e-6
    assert cosines(got, want).min() >= 0.99999


def test_what_files_may_not_have(tmp_path: Path) -> None:
    """Keys and tensors that would change embeddings in a way that is not known."""
    for name, keys, tensors, words in (
        ("modern-bert", {"decision.block_count": 1}, (), "that decides is not supported"),
        ("modern-bert", {"hidden_activation": "tanh"}, (), "activation 'tanh' is not supported"),
        ("gemma-embedding", {}, ("dense_2",), "matrices after the pooling"),
        ("bert", {"attention.causal": True}, (), "see only those before them"),
    ):
        model = ENCODERS[name]()
        model.keys |= keys
        for tensor in tensors:
            model.matrix(tensor, N_EMBD, N_EMBD)
        with pytest.raises(ModelFileError, match=words):
            spec_of(model.write(tmp_path / f"{name}.gguf"))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_matrices_after_the_pooling(device: str, tmp_path: Path) -> None:
    name = "gemma-embedding-dense"
    want = np.frombuffer(base64.b64decode(STORED[name]), np.float32).reshape(-1, N_EMBD)
    with LLM(write_encoder(name, tmp_path / "m.gguf"), device=device, progress=False) as llm:
        got = llm.embed(TEXTS, normalize=False)
        assert nmse(got, want) <= 2e-6
        rows = llm.embed(TEXTS, pooling="none", normalize=False)
        np.testing.assert_allclose([row.mean(0) for row in rows], want, rtol=0.02, atol=0.01)
        assert llm.warnings == []


def test_packed_weights(tmp_path: Path) -> None:
    path = write_encoder("bert", tmp_path / "bert.gguf", GGMLType.Q8_0)
    plain, packed = (encoded(path, backend, TEXTS) for backend in BACKENDS)
    assert cosines(plain, packed).min() >= 0.999


def test_a_text_is_the_same_whatever_comes_with_it(encoder: Path) -> None:
    together = encoded(encoder, BACKENDS[1], TEXTS)
    alone = [encoded(encoder, BACKENDS[1], [ids]) for ids in TEXTS]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_tokens_see_those_after_them(encoder: Path) -> None:
    ids = TEXTS[0]
    whole, changed = (
        encoded(encoder, BACKENDS[1], [text]) for text in (ids, [*ids[:-1], ids[-1] ^ 1])
    )
    assert np.abs(whole[-2] - changed[-2]).max() > 1e-4


def test_a_long_text_takes_logits_in_parts(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(encoder, BACKENDS[0], TEXTS)
    monkeypatch.setattr("localkv.kernels.attention_mixers.MOST_LOGITS", 1000)
    assert nmse(encoded(encoder, BACKENDS[0], TEXTS), whole) <= 1e-6


def test_poolings_and_batches(encoder: Path) -> None:
    """Each is what it says of the tokens' vectors; a batch has as many whole texts as fit."""
    with LLM(encoder, n_batch=50, progress=False) as llm:
        rows = llm.embed(TEXTS, pooling="none", normalize=False)
        assert [row.shape for row in rows] == [(len(ids), N_EMBD) for ids in TEXTS]
        for pooling, of in (
            ("mean", lambda row: row.mean(0)),
            ("cls", lambda row: row[0]),
            ("last", lambda row: row[-1]),
        ):
            got = llm.embed(TEXTS, pooling=pooling, normalize=False)
            np.testing.assert_allclose(got, [of(row) for row in rows], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(llm.embed(TEXTS), axis=-1), 1.0, rtol=1e-6)


def test_the_file_names_the_pooling(tmp_path: Path) -> None:
    with LLM(write_encoder("bert", tmp_path / "bert.gguf"), progress=False) as llm:
        np.testing.assert_array_equal(llm.embed(TEXTS), llm.embed(TEXTS, pooling="cls"))


def test_an_encoder_writes_no_text(encoder: Path) -> None:
    with LLM(encoder, progress=False) as llm:
        for call in (
            lambda: llm.complete([2, 6, 3]),
            lambda: llm.complete([[2, 6, 3]]),
            lambda: llm.stream([2, 6, 3]),
            lambda: llm.logits([2, 6, 3]),
            lambda: llm.engine.evaluate([2, 6, 3]),
        ):
            with pytest.raises(UsageError, match="makes embeddings, and no text") as caught:
                call()
            assert "localkv embed" in (caught.value.hint or "")
        assert llm.memory.cache_k == llm.memory.cache_v == 0


def spec_of(path: Path) -> ModelSpec:
    return model_spec(open_gguf(path))


def test_a_backend_without_such_attention_refuses_by_name(encoder: Path) -> None:
    backend = reference_backend()
    mixers = {kind: mix for kind, mix in backend.mixers.items() if "Encoder" not in kind.__name__}
    object.__setattr__(backend, "mixers", mixers)
    with pytest.raises(ModelFileError, match=r"can't run attention to both sides \(layer 0 of a "):
        check_layers(backend, spec_of(encoder))


def test_positions_end(tmp_path: Path) -> None:
    path = write_encoder("bert", tmp_path / "bert.gguf")
    with pytest.raises(UsageError, match=f"the model has {N_POSITIONS} positions"):
        LLM(path, n_ctx=N_POSITIONS + 1, progress=False)
    with LLM(path, progress=False) as llm:
        with pytest.raises(ContextOverflowError, match="text 2 of 2 has 129 tokens") as caught:
            llm.embed([[2, 3], [5] * (N_POSITIONS + 1)])
        assert "no positions after these" in (caught.value.hint or "")
        assert llm.embed([[5] * N_POSITIONS]).shape == (1, N_EMBD)


def test_encoders_have_no_cache(encoder: Path) -> None:
    spec = spec_of(encoder)
    assert spec.is_encoder
    assert spec.groups == ()
    assert ARCHS[spec.architecture]


ON_ONE_THREAD = """
import time
import numpy as np
from localkv.arch.spec import AttentionParams, AttentionSpec, EncoderAttentionSpec
from localkv.kernels.attention_mixers import attend_texts

spec = EncoderAttentionSpec(AttentionSpec(12, 12, 64, 64, AttentionParams(0.125)))
q, k, v = np.random.default_rng(0).standard_normal((3, 1024, 12, 64), np.float32)
attend_texts(q, k, v, (0, 512, 1024), spec)
everywhere, here = time.process_time(), time.thread_time()
for _ in range(5):
    attend_texts(q, k, v, (0, 512, 1024), spec)
print(time.process_time() - everywhere, time.thread_time() - here)
"""


def test_attention_stays_on_its_thread() -> None:
    """OpenBLAS's own threads spin beside ours: embeddings took four times as long."""
    done = subprocess.run(
        [sys.executable, "-c", ON_ONE_THREAD], capture_output=True, text=True, check=True
    )
    everywhere, here = map(float, done.stdout.split())
    assert everywhere < 1.2 * here + 0.05
