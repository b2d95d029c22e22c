"""Random models of a known shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.errors import UsageError
from localkv.kernels.select import select_backend
from localkv.loader.known_models import KNOWN_MODELS, KnownModel
from localkv.loader.synthetic import RANDOM_ROWS, random_rows, synthetic_model
from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor

WEIGHT_TYPES = [fmt.name for fmt in FORMATS.values() if fmt.is_weight]


@pytest.mark.parametrize("name", WEIGHT_TYPES)
def test_random_rows_have_the_variance_of_a_trained_matrix(name: str) -> None:
    fmt, n_rows, n_in = FORMATS[name], RANDOM_ROWS + 5, 512
    rows = random_rows(fmt, n_rows, n_in, generator=np.random.default_rng(1))
    assert rows.shape == (n_rows, fmt.row_bytes(n_in))
    values = PackedTensor(fmt, rows, (n_rows, n_in)).decode()
    assert np.isfinite(values).all()
    assert values.var().item() * n_in == pytest.approx(1.0, rel=0.1)
    assert abs(values.mean().item()) < 0.12 * values.std().item()  # q4_0's codes are -8 to 7


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("shape", ["llama-tiny", "moe-tiny"])
def test_a_synthetic_model_runs(shape: str, device: str) -> None:
    model = synthetic_model(shape, "q4_0", select_backend(device))
    assert model.weights.layers[0].attention.attn_q.weight.format.name == "q4_0"
    assert model.weights.output.weight.format.name == "q6_K"
    logits = Engine(model, CacheConfig("q8_0", "q4_0", n_ctx=300)).logits([1, 2, 3, 4, 5])
    assert logits.shape == (5, 512)
    assert 0.3 < logits.std().item() < 3.0


def narrow(shape: KnownModel) -> KnownModel:
    """The first layers, until each kind was among them, of small widths; heads are as they are."""
    layers, keys = shape.spec.layers, dict(shape.keys)
    n = len(layers)
    if not keys.get("attention.shared_kv_layers"):  # the last layers read rows of others
        n = 1 + max(layers.index(kind) for kind in layers)
    if "attention.key_length" not in keys:
        keys["attention.key_length"] = keys["embedding_length"] // keys["attention.head_count"]
    for key, value in keys.items():
        if isinstance(value, list) and len(value) == keys["block_count"]:
            keys[key] = value[:n]
        if key.endswith("feed_forward_length"):
            width = 64 if key.startswith("expert") else 256
            widths = value[:n] if isinstance(value, list) else [value]
            widths = [min(each, width) for each in widths]
            keys[key] = widths if isinstance(value, list) else width
    keys |= {"block_count": n, "embedding_length": 256}
    if n_experts := keys.get("expert_count"):
        keys["expert_count"] = min(n_experts, 32)
    return replace(shape, n_vocab=512, keys=keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_every_shape_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, name, narrow(KNOWN_MODELS[name]))
    model = synthetic_model(name, "q4_0", select_backend("cpu"))
    logits = Engine(model, CacheConfig("q8_0", "q4_0", n_ctx=300)).logits([1, 2, 3, 4, 5])
    assert logits.shape == (5, 512)
    assert np.isfinite(logits).all()
    assert logits.std() > 0


def test_weights_that_were_laid_out_anew_are_kept_once() -> None:
    model = synthetic_model("llama-tiny", "q4_0", select_backend("cpu"))
    weights = model.weights
    for weight in (weights.output.weight, weights.layers[0].attention.attn_q.weight):
        assert not weight.reads_rows
        assert not weight.rows.any()  # given back
    assert weights.token_embd.rows.any()


def test_two_of_the_same_seed_are_the_same() -> None:
    a, b, c = (
        synthetic_model("llama-tiny", "q8_0", select_backend("reference"), seed=seed)
        for seed in (3, 3, 4)
    )
    rows = [model.weights.layers[1].attention.attn_k.weight.rows for model in (a, b, c)]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("shape", "type_name", "message"),
    [
        ("llama-9b", "q4_0", "unknown shape 'llama-9b'; did you mean llama-8b?"),
        ("llama-8b", "q9_9", "unknown type of weights 'q9_9'"),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_the_place_of_the_list(
    shape: str, type_name: str, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        synthetic_model(shape, type_name, select_backend("reference"))
    assert error.value.message == message
    assert error.value.hint is not None
    assert "localkv plan --help-all" in error.value.hint
