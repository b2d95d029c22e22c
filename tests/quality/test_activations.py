"""What meets each matrix: as llama-imatrix measures it, and as plain operations give it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localkv import LLM
from localkv.config import CacheConfig
from localkv.errors import LocalKVError
from localkv.kernels.select import select_backend
from localkv.loader.importance import Sums
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.activations import Met, Squares, read_chunks
from localkv.quality.scores import perplexity, score_chunks
from support.f32_copy import f32_copy
from support.paths import DATA, MODELS

LLAMA_CPP: dict[str, dict[str, Any]] = json.loads((DATA / "llama_cpp_imatrix.json").read_text())
N_CTX = 64
EXACT = CacheConfig("f32", "f32", n_ctx=N_CTX, kv_rotation="off", type_k_rope="f32")


def squares(model: Transformer, ids: list[int], *, n_batch: int = 512) -> Mapping[str, Sums]:
    found = Squares(lambda name: True)
    chunks = [ids[i : i + N_CTX] for i in range(0, len(ids), N_CTX)]
    for scores in read_chunks(model, chunks, EXACT, found.add, n_batch=n_batch, with_output=True):
        assert scores is None
    return found.sums


def check(found: Mapping[str, Sums], want: Mapping[str, Any]) -> None:
    wanted = {name for name in found if name.startswith("blk.") or name == "output.weight"}
    assert wanted == set(want)
    for name, one in want.items():
        own = found[name]
        values = own.squares
        some = [values.sum(dtype=np.float64), *values[:: max(1, len(values) // 6)]]
        np.testing.assert_allclose(some, one["in_sum2"], rtol=1e-4, err_msg=name)
        assert own.counts.tolist() == one["counts"], name


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return f32_copy(MODELS / "tales-4M-F16.gguf", tmp_path_factory.mktemp("tales") / "f32.gguf")


@pytest.mark.parametrize("n_batch", [512, 24])
def test_a_dense_model_as_llama_imatrix_has_it(tales: Path, n_batch: int) -> None:
    model = load_model(tales, select_backend("cpu"))[0]
    want = LLAMA_CPP["tales"]
    check(squares(model, want["ids"], n_batch=n_batch), want["tensors"])


@pytest.mark.parametrize("name", [name for name in LLAMA_CPP if name != "tales"])
def test_experts_and_latents_as_llama_imatrix_has_them(
    conformance: Path, tmp_path: Path, name: str
) -> None:
    path = f32_copy(conformance / f"{name}.gguf", tmp_path / "f32.gguf")
    want = LLAMA_CPP[name]
    check(squares(load_model(path, select_backend("cpu"))[0], want["ids"]), want["tensors"])


@pytest.mark.slow
def test_the_reference_gives_the_same(tales: Path) -> None:
    ids = LLAMA_CPP["tales"]["ids"]
    ours, plain = (
        squares(load_model(tales, select_backend(device))[0], ids)
        for device in ("cpu", "reference")
    )
    assert ours.keys() == plain.keys()
    for name, own in ours.items():
        np.testing.assert_allclose(own.squares, plain[name].squares, rtol=1e-4, err_msg=name)


def test_scores_on_the_way_are_those_of_perplexity() -> None:
    ids = LLAMA_CPP["tales"]["ids"]
    with LLM(MODELS / "tales-4M-Q8_0.gguf", n_ctx=N_CTX, progress=False) as llm:
        cache = CacheConfig("f16", "f16", n_ctx=N_CTX)
        chunks = [ids[:N_CTX], ids[N_CTX:]]
        want = [one[0].nll for one in score_chunks(llm.engine.model, chunks, [cache], n_batch=24)]
        for with_output in (False, True):
            reading = read_chunks(
                llm.engine.model,
                chunks,
                cache,
                lambda met, part, rows: None,
                n_batch=24,
                with_output=with_output,
                scored=True,
            )
            found = [one.nll for one in reading if one is not None]
            for own, theirs in zip(found, want, strict=True):
                # unfused norms and residuals round in another order
                assert perplexity(own).value == pytest.approx(perplexity(theirs).value, rel=1e-3)


def test_values_that_are_not_finite_are_refused() -> None:
    found = Squares(lambda name: True)
    with pytest.raises(LocalKVError, match=r"meet 'a\.weight' are not finite"):
        found.add(Met(("a.weight",)), 0, np.full((2, 4), np.inf, np.float32))
