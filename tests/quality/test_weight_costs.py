"""Weight profiles: what is measured, the file, and the choice of types."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.weights import load_model
from localkv.quality.kv_profile import ChunkCosts, base_types
from localkv.quality.weight_costs import WeightPlan, measure_weights
from localkv.quality.weight_profile import (
    Curve,
    MatrixCosts,
    WeightProfile,
    hull,
    read_weight_profile,
    write_weight_profile,
)
from localkv.quant_formats import FORMATS
from support.tiny_model import write_tiny_model

IDS = [1, *(3 + (7 * i * i + i) % 40 for i in range(63))]
TYPES = ("f16", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("weights") / "tiny.gguf")


@pytest.fixture(scope="module")
def measured(model: Path) -> WeightProfile:
    plan = WeightPlan(tuple(FORMATS[name] for name in TYPES), n_ctx=len(IDS))
    return measure_weights(open_gguf(model), cpu_backend(), IDS, plan, text="a test")


@pytest.mark.slow
def test_costs_are_of_the_files_that_quantize_makes(
    program, measured: WeightProfile, model: Path, tmp_path: Path
) -> None:
    """With exact activations, the file diverges as all matrices together did, and costs add up."""
    made = tmp_path / "q4_0.gguf"
    done = program("quantize", "--pure", "--allow-requantize", model, made, "Q4_0")
    assert done.code == 0, done.err
    backend = cpu_backend()
    source, gguf = open_gguf(model), open_gguf(made)
    base, other = (
        load_model(file, backend, decoded={n for n, t in file.tensors.items() if len(t.shape) > 1})[
            0
        ]
        for file in (source, gguf)
    )
    chunk = ChunkCosts(base, IDS, CacheConfig("f16", "f16", n_ctx=len(IDS)))
    chunk.model = other
    found = chunk.divergence(base_types(base), first=0) / len(chunk.targets)
    (whole,) = (one for one in measured.whole if one.type == "q4_0")
    assert found == pytest.approx(whole.verified, rel=1e-5)
    assert whole.predicted == pytest.approx(whole.verified, rel=0.5)


@pytest.mark.slow
def test_what_is_measured(measured: WeightProfile, model: Path) -> None:
    for one in measured.matrices:
        assert one.kld["q8_0"] < one.kld["q4_0"], one.name
        assert one.kld["f16"] <= one.kld["q8_0"] / 10, one.name
    shares = [one.activations for one in measured.matrices]
    assert min(shares) > 0
    assert sum(shares) == pytest.approx(measured.all_activations)
    layers = max(measured.layers)
    assert 0 < layers < 2 * measured.all_activations
    n_bytes, _ = measured.sums(measured.in_one_type(FORMATS["q8_0"]))
    gguf = open_gguf(model)
    assert n_bytes < sum(tensor.n_bytes for tensor in gguf.tensors.values())


def profile_of(*costs: tuple[float, float, float]) -> WeightProfile:
    """Matrices of different sizes in q8_0, q5_0 and q4_0."""
    names = ("q8_0", "q5_0", "q4_0")
    matrices = tuple(
        MatrixCosts(f"blk.{i}.ffn_up.weight", (1 + i, 64), dict(zip(names, kld, strict=True)), 0.0)
        for i, kld in enumerate(costs)
    )
    return WeightProfile("m", "n", "t", 8, 4, "", 100, matrices, (0.0,), {}, 0.0, ())


COST = st.floats(0, 10)


@settings(max_examples=50)
@given(st.lists(st.tuples(COST, COST, COST), min_size=1, max_size=4), st.integers(0, 2000))
def test_choices_against_all_of_them(costs: list[tuple[float, float, float]], budget: int) -> None:
    """No choice within the budget is better than the curve's by more than a step of one matrix."""
    profile = profile_of(*costs)
    every = [
        profile.sums(types) for types in itertools.product(*(one.kld for one in profile.matrices))
    ]
    found = Curve(profile).within(budget)
    fitting = [cost for n_bytes, cost in every if n_bytes <= budget]
    if found is None:
        least = min(every)[0]
        assert least > budget or Curve(profile).start != ["q4_0"] * len(costs)
        return
    types, n_bytes, cost = found
    assert profile.sums(types) == (n_bytes, pytest.approx(cost, abs=1e-9))
    assert n_bytes <= budget
    largest = max((step.saved for step in Curve(profile).steps), default=0.0)
    assert min(fitting) - 1e-9 <= cost <= min(fitting) + largest + 1e-9


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(1, 99), COST), min_size=1))
def test_hull(points: dict[str, tuple[int, float]]) -> None:
    """No point lies below a line between neighbours."""
    names = hull(points)
    assert min(points.values())[0] == points[names[0]][0]
    for a, b in itertools.pairwise(names):
        (x0, y0), (x1, y1) = points[a], points[b]
        assert x0 < x1
        assert y0 > y1
        for x, y in points.values():
            if x0 <= x <= x1:
                assert y >= y0 + (y1 - y0) * (x - x0) / (x1 - x0) - 1e-9


def test_file(tmp_path: Path) -> None:
    path, profile = tmp_path / "w.json", profile_of((0.1, 0.2, 0.5), (0.0, 0.3, 0.4))
    write_weight_profile(path, profile)
    assert read_weight_profile(path) == profile


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"kind": "another"}, "not a weight profile"),
        ({"matrices": []}, "0 matrices"),
        ({"matrices": 5}, "damaged"),
        ({"layers": [-1.0]}, "a cost is not"),
        ({"layers": [True]}, "a cost is not"),
        ({"n_tokens": 1.5}, "a count is not"),
        ({"kinds": []}, "damaged"),
        ({"whole": [{"type": "kv2_0", "predicted": 0, "verified": 0}]}, "none of weights"),
        ({"name": 7}, "a text is missing"),
    ],
)
def test_damaged_file(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = tmp_path / "w.json"
    write_weight_profile(path, profile_of((0.1, 0.2, 0.5)))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UsageError, match=problem):
        read_weight_profile(path)
