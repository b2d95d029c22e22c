"""What is said of kernels is what runs, for every type of weights and on every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.kernels.backend import Method, Use, in_words, uses
from localkv.kernels.cpu.cpu_backend import ACTIVATION_KIND, cpu_backend
from localkv.kernels.cpu.linear.matrices import has_kernel
from localkv.kernels.layer_weights import AttentionWeights, LayerWeights, Linear, MlpWeights
from localkv.kernels.reference import torch_arrays
from localkv.kernels.reference.backend import reference_backend
from localkv.quant_formats import FORMATS, TOKEN_FORMATS, WEIGHT_FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.simd.cpu_features import HAS_BYTE_DOTS, HAS_BYTE_SHUFFLE, HAS_VNNI, byte_dots
from support.cpu_products import eight_bits, error
from support.layers import model_of, rms
from support.quick import quick_types
from support.random_model import variant
from support.random_packed import random_packed
from support.torch_edge import with_tensors

WEIGHT_NAMES = [fmt.name for fmt in WEIGHT_FORMATS.values()]
CPU = "CPU"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Types of the tensors that are decoded."""
    names = list[str]()
    decode = PackedTensor.decode

    def spy(self: PackedTensor) -> np.ndarray:
        names.append(self.format.name)
        return decode(self)

    monkeypatch.setattr(PackedTensor, "decode", spy)
    return names


@pytest.mark.parametrize(
    ("name", "n_in", "halves"),
    [
        *(
            pytest.param(*name.values, 512, False, marks=name.marks)
            for name in quick_types(WEIGHT_NAMES)
        ),
        ("f16", 512, True),
        ("f32", 504, False),  # no whole number of vectors
    ],
)
def test_a_product_runs_as_is_said(name: str, n_in: int, halves: bool, decoded: list[str]) -> None:
    backend = cpu_backend()
    packed = replace(random_packed(name, 32, n_in), halves_activations=halves)
    x, norm = torch.randn(2, n_in), rms(torch.ones(n_in), 0.0)
    weight = backend.prepare(packed)
    method = backend.methods.product(weight)
    decoded.clear()
    got = with_tensors(backend.logits)(x, norm, Linear(weight), model_of(n_in, 32))
    assert not decoded

    normed = (x.double() / x.double().square().mean(-1, keepdim=True).sqrt()).float()
    sides = {"fp16": normed.half(), "bf16": normed.bfloat16(), "float32": normed}
    if n_in % 32 == 0:
        sides["8-bit"] = eight_bits(normed)
    matrix = torch_arrays.decoded(packed, torch.float64)
    nearest = min(sides, key=lambda side: error(got, sides[side].double() @ matrix.T))
    assert nearest in method.words
    assert HAS_BYTE_DOTS or "8-bit" not in method.words


@pytest.mark.parametrize("name", WEIGHT_NAMES)
def test_the_reference_says_that_it_decodes(name: str, decoded: list[str]) -> None:
    backend = reference_backend()
    weight = backend.prepare(random_packed(name, 32, 512))
    backend.logits(torch.randn(1, 512), rms(torch.ones(512)), Linear(weight), model_of(512, 32))
    assert decoded == [name]
    assert backend.methods.product(weight) == Method("decoded tile by tile, multiplied in torch")


@pytest.mark.parametrize("name", TOKEN_FORMATS)
def test_what_is_said_of_the_cache(name: str, tiny_model: Path, decoded: list[str]) -> None:
    fmt = TOKEN_FORMATS[name]
    said = cpu_backend().methods
    assert said.store(fmt).words.startswith("Numba")
    integers = fmt.block_size > 1 and HAS_VNNI and HAS_BYTE_SHUFFLE
    for side, factors in (("K", "16-bit queries"), ("V", "16-bit weights")):
        words = said.tiles(fmt, side).words
        assert (factors in words) == integers
        assert (words == "float32") != integers


def test_a_mixed_model_is_described_by_type() -> None:
    """Q4_K_M is one: some matrices of every layer have another type, and so has the output."""
    backend = cpu_backend()

    def linear(name: str) -> Linear:
        return Linear(backend.prepare(random_packed(name, 32, 256)))

    mlps = [MlpWeights(*map(linear, ("q4_K", "q4_K", down))) for down in ("q4_K", "q3_K")]
    attention = AttentionWeights(*map(linear, ("q4_K", "q8_0", "f32", "q4_K")))
    norm = rms(torch.ones(256))
    layers = [LayerWeights(attention, mlp, norm, norm) for mlp in mlps]
    found = uses(backend.methods, layers, linear("q6_K"), [("f16", "q8_0")])
    sides = f"8-bit activations ({byte_dots()})" if HAS_BYTE_DOTS else "float32 activations"
    as_in_file = f"; q8_0: packed as in the file, {sides}" if HAS_BYTE_DOTS else ""
    assert in_words(found)["products"] == (
        f"{'q4_K' if HAS_BYTE_DOTS else 'q4_K, q8_0'}, q3_K, q6_K: packed panels, {sides}"
        f"{as_in_file}; f32: rows as in the file, float32 activations"
    )


def random_file(path: Path, kind: GGMLType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of any type; gguf itself packs only some."""

    def quantize(values: np.ndarray, kind: GGMLType) -> np.ndarray:
        name = WEIGHT_FORMATS[int(kind)].name
        return random_packed(name, *values.shape).rows

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    return variant("llama", n_embd=256, n_ff=256).write(path, kind)


@pytest.mark.parametrize("name", quick_types(WEIGHT_NAMES))
def test_no_type_lacks_a_kernel(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = random_file(tmp_path / "m.gguf", GGMLType(FORMATS[name].ggml_type), monkeypatch)
    llm = LLM(path, n_ctx=64)
    weight = llm.engine.model.weights.output.weight
    assert has_kernel(weight)
    assert llm.kernels["products"].startswith(f"{name}: ")


def test_panels_that_are_not_made_yet_are_said(tmp_path: Path) -> None:
    """The statement is of what products do by now."""
    llm = LLM(variant("llama").write(tmp_path / "m.gguf", GGMLType.Q4_0), n_ctx=64, device="cpu")
    assert "made with the first 16 tokens" in llm.kernels["products"]
    ids = list(range(20))
    llm.engine.logits(ids)
    assert "made with the first 16 tokens" in llm.kernels["products"]
    llm.engine.logits(ids[::-1])
    assert llm.kernels["products"] == f"q4_0: packed panels, {ACTIVATION_KIND}"
    llm.close()
    assert llm.kernels["products"] == f"q4_0: packed panels, {ACTIVATION_KIND}"


def test_f16_is_not_said_to_be_in_panels(tiny_model: Path) -> None:
    kernels = LLM(tiny_model).kernels
    assert kernels["products"] == "f16: rows as in the file, float32 activations"


def test_experts_on_the_cpu_are_not_slow(tmp_path: Path) -> None:
    path = variant("llama-moe").write(tmp_path / "m.gguf", GGMLType.Q4_0)
    llm = LLM(path, n_ctx=64)
    assert "one chain" in llm.kernels["experts"]


def test_types_of_one_method_stand_together() -> None:
    panels, rows, slow = Method("panels"), Method("rows"), Method("by tile in torch")
    found = [
        Use("attention", "", Method("packed")),
        *(Use("products", name, panels) for name in ("q4_K", "q6_K")),
        Use("products", "f32", rows),
        *(Use("products", name, slow) for name in ("q2_K", "q3_K")),
        Use("experts", "", Method("in torch")),
    ]
    assert in_words(found) == {
        "attention": "packed",
        "products": "q4_K, q6_K: panels; f32: rows; q2_K, q3_K: by tile in torch",
        "experts": "in torch",
    }
