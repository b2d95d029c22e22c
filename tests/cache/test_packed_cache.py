"""The forward pass through packed and rotated caches."""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.cache.layout import SegmentSpec, cache_segments
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.kernels.reference.torch_arrays import decode, encode
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quant_formats import TOKEN_FORMATS
from support.cache_types import NAMES, partners
from support.forward import CONFORMANCE_IDS, IDS, new_cache, nmse, run, run_together
from support.layouts import group_of
from support.quick import quick
from support.random_model import RandomModel, variant

if TYPE_CHECKING:
    from support.summary import Summary

EXACT = reference_backend(torch.float64)
BACKENDS = pytest.mark.parametrize(
    "backend", [reference_backend(), cpu_backend()], ids=lambda b: b.name
)
PACKED = [name for name, fmt in TOKEN_FORMATS.items() if fmt.shares_scale]
FLOATS = [name for name, fmt in TOKEN_FORMATS.items() if not fmt.shares_scale]


def segments(type_k: str, type_v: str, kv_rotation: str = "auto") -> list[SegmentSpec]:
    return cache_segments(CacheConfig(type_k, type_v, kv_rotation=kv_rotation), group_of(64))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in float32, so that nothing but the cache rounds."""
    folder = tmp_path_factory.mktemp("packed")
    return RandomModel().write(folder / "model.gguf", GGMLType.F32)


@functools.cache
def relative_error(name: str) -> float:
    """The squared error over the squared norm of Gaussian rows."""
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))
    fmt = TOKEN_FORMATS[name]
    error = decode(fmt, encode(fmt, x)) - x
    return float(error.square().sum() / x.square().sum())


@pytest.fixture(scope="module", params=[reference_backend(), cpu_backend()], ids=lambda b: b.name)
def unpacked(request: pytest.FixtureRequest, path: Path) -> tuple[Transformer, np.ndarray]:
    """The model, and its logits with K and V in float32."""
    model, _ = load_model(path, request.param)
    return model, run(model, new_cache(model, SegmentSpec("f32", "f32")), IDS[:90])


@pytest.mark.parametrize(
    ("kv_rotation", "type_k"),
    quick(
        product(("auto", "off"), NAMES),
        {*product(("auto",), NAMES), ("off", "q4_0"), ("off", "f16")},
    ),
)
def test_every_type_costs_what_it_costs(
    kv_rotation: str, type_k: str, unpacked: tuple[Transformer, np.ndarray]
) -> None:
    """The logits' error is the sum of what the types do to K and to V, times the model's factors.

    An error in K counts some three times as much as one in V, since attention is sharp.
    """
    model, want = unpacked
    for type_v in partners(type_k):
        cache = new_cache(model, *segments(type_k, type_v, kv_rotation))
        got = nmse(run(model, cache, IDS[:90], chunk=40), want)
        expected = 3.3 * relative_error(type_k) + 1.1 * relative_error(type_v)
        assert 0.4 * expected <= got <= 2.5 * expected + 1e-12, (type_k, type_v)


SOME = (
    ("q8_0", "q4_0"),
    ("q4_0", "q8_0"),
    ("iq4_nl", "q5_1"),
    ("q4_1", "f16"),
    ("fp8_e4m3", "q5_0"),
    ("fp8_e5m2_token", "fp8_e4m3_token"),
)
PAIRS = pytest.mark.parametrize(("type_k", "type_v"), quick(SOME, (SOME[0], SOME[5])))


@pytest.mark.slow
@PAIRS
def test_chunks_do_not_matter(type_k: str, type_v: str, path: Path) -> None:
    """A prompt at once and token by token stores the same codes and gives the same logits.

    In float64, that is. In float32 a product can differ in its last bit with the number of rows,
    and now and then a value is rounded to the code beside: hence the tolerance.
    """
    ids = (IDS * 3)[:270]
    for backend, tolerance in ((EXACT, 1e-20), (cpu_backend(), 2e-5)):
        model, _ = load_model(path, backend)
        once = run(model, new_cache(model, *segments(type_k, type_v)), ids)
        for chunk in (1, 100):
            again = run(model, new_cache(model, *segments(type_k, type_v)), ids, chunk)
            assert nmse(again, once) < tolerance


@PAIRS
def test_several_sequences(type_k: str, type_v: str, path: Path) -> None:
    """Sequences of different length in one batch are what they are alone."""
    parts = [IDS[:3], (IDS * 4)[20:320], IDS[50:51]]
    specs = segments(type_k, type_v)
    for backend, tolerance in ((EXACT, 1e-20), (cpu_backend(), 2e-5)):
        model, _ = load_model(path, backend)
        alone = [run(model, new_cache(model, *specs), ids) for ids in parts]
        together = run_together(model, specs, parts)
        assert nmse(together, np.stack([rows[-1] for rows in alone])) < tolerance


@pytest.mark.parametrize("bounds", [(0, 4), (0, 256), (0, 100, 101)])
def test_segments_merge(bounds: tuple[int, ...], path: Path) -> None:
    """However the positions are divided, rows are packed and rotated the same."""
    model, _ = load_model(path, EXACT)
    ids = (IDS * 3)[:270]
    want = run(model, new_cache(model, SegmentSpec("q4_0", "q5_1", 0, 64, 64)), ids)
    specs = [SegmentSpec("q4_0", "q5_1", first, 64, 64) for first in bounds]
    assert nmse(run(model, new_cache(model, *specs), ids, chunk=130), want) < 1e-20


def test_segments_of_different_types_and_rotations(path: Path) -> None:
    """The first tokens in f16 and the rest in q8_0, rotated: between the two alone."""
    model, _ = load_model(path, cpu_backend())
    want = run(model, new_cache(model, SegmentSpec("f32", "f32")), IDS)
    halves = new_cache(model, SegmentSpec("f16", "f16"), SegmentSpec("q8_0", "q8_0", 50, 64, 64))
    whole = new_cache(model, SegmentSpec("q8_0", "q8_0", 0, 64, 64))
    got = nmse(run(model, halves, IDS), want)
    assert 1e-6 < got < 0.8 * nmse(run(model, whole, IDS), want)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_which_caches_are_rotated(head_dim: int) -> None:
    block = {64: 64, 128: 128, 192: 64, 256: 256}.get(head_dim, 0)
    for type_k in TOKEN_FORMATS:
        for type_v in TOKEN_FORMATS:
            (auto,) = cache_segments(CacheConfig(type_k, type_v, kv_sink=0), group_of(head_dim))
            assert (auto.type_k, auto.type_v, auto.first_position) == (type_k, type_v, 0)
            assert auto.rotation_k == (block if type_k in PACKED else 0)
            assert auto.rotation_v == (64 if block and type_v in PACKED else 0)
            (off,) = cache_segments(
                CacheConfig(type_k, type_v, kv_rotation="off", kv_sink=0), group_of(head_dim)
            )
            assert (off.rotation_k, off.rotation_v) == (0, 0)
            wanted = CacheConfig(type_k, type_v, kv_rotation="on", kv_sink=0)
            if block:
                (on,) = cache_segments(wanted, group_of(head_dim))
                assert (on.rotation_k, on.rotation_v) == (block, 64)
            else:
                with pytest.raises(UsageError, match=f"multiple of 64, .* is {head_dim} ") as error:
                    cache_segments(wanted, group_of(head_dim))
                assert "\n" not in str(error.value)


def test_the_rotation_that_users_choose(path: Path, tmp_path: Path) -> None:
    def rotations(**options: str) -> tuple[int, int]:
        (segment,) = LLM(path, n_ctx=256, **options).engine.cache.layers[-1].segments
        return segment.rotation_k, segment.rotation_v

    assert rotations() == (0, 0)
    assert rotations(cache_type_k="q8_0") == (64, 0)
    assert rotations(cache_type_v="q4_0", kv_rotation="auto") == (0, 64)
    assert rotations(cache_type_k="q4_0", cache_type_v="q4_0", kv_rotation="off") == (0, 0)
    assert rotations(cache_type_k="fp8_e4m3", kv_rotation="on") == (64, 64)
    with pytest.raises(UsageError, match=r"unknown kv_rotation 'yes' .use auto, on, off\)"):
        LLM(path, kv_rotation="yes")
    odd = variant("llama-hd80").write(tmp_path / "hd80.gguf")
    assert np.isfinite(LLM(odd, cache_type_k="fp8_e5m2").logits(IDS[:5])).all()
    with pytest.raises(UsageError, match="kv_rotation 'on' needs a head_dim that is a multiple"):
        LLM(odd, kv_rotation="on")


def errors_against_exact(model: Transformer, conformance: Path) -> dict[str, float]:
    """NMSE of each pair of types, rotated and not, against gguf-py's packing in float64."""
    errors = {}
    for path in sorted((conformance / "kv_cache").glob("llama.*.exact.f32")):
        _, pair, rotated, *_ = path.name.split(".")
        want = np.fromfile(path, np.float32).reshape(300, -1)
        specs = segments(*pair.split("-"), "auto" if rotated == "rot" else "off")
        got = run(model, new_cache(model, *specs), CONFORMANCE_IDS, chunk=128)
        errors[f"{pair}.{rotated}"] = nmse(got, want)
    assert len(errors) == 14
    return errors


@pytest.mark.slow
def test_exact_logits_in_float64(conformance: Path, summary: Summary) -> None:
    """Every code is the same, and every bit of a rotation and of a decoded row counts."""
    model, _ = load_model(conformance / "archs" / "llama.gguf", EXACT)
    errors = errors_against_exact(model, conformance)
    summary("NMSE against exact, packed, float64", errors)
    assert max(errors.values()) < 1e-18


@BACKENDS
def test_exact_logits(backend: Backend, conformance: Path, summary: Summary) -> None:
    """A value that lies between two codes is now and then rounded to the other one in float32."""
    model, _ = load_model(conformance / "archs" / "llama.gguf", backend)
    errors = errors_against_exact(model, conformance)
    summary(f"NMSE against exact, packed, {backend.name}", errors)
    assert max(errors.values()) <= 2e-5
