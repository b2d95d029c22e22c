"""LoRA adapters from files: models of many architectures beside copies that they are merged into,
and files that are refused."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from localkv.errors import LocalKVError, UsageError
from localkv.llm import LLM
from localkv.loader.adapter_file import open_adapter
from support.adapters import ADAPTED, write_adapted, write_adapter, write_merged
from support.expert_models import EXPERT_MODELS
from support.f32_copy import f32_copy
from support.forward import nmse
from support.hybrid_models import hybrid
from support.own_models import IDS, SHOWN, write_own
from support.paths import DATA

MODELS = ("granite_swa", "chatglm", "falcon", "deci", "plamo3")
"""Split and whole q, k and v, gate and up in one tensor, layers of several shapes, biases."""


def logits(model: Path, **options: object) -> np.ndarray:
    with LLM(model, n_ctx=256, progress=False, **options) as llm:
        return llm.logits(IDS)


@pytest.mark.parametrize(
    "name", [*MODELS[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS[2:])]
)
def test_adapter_is_the_merged_model(name: str, tmp_path: Path) -> None:
    model = write_own(name, tmp_path / "model.gguf")
    first = write_adapter(tmp_path / "a.gguf", model)
    second = write_adapter(tmp_path / "b.gguf", model, rank=7, seed=2, embedding=True)
    merged = write_merged(tmp_path / "merged.gguf", model, (first, 1.0), (second, -0.5))
    want = logits(merged)
    for device in ("cpu", "reference"):
        got = logits(model, lora={str(first): 1.0, str(second): -0.5}, device=device)
        assert nmse(got, want) < 1e-7
    assert nmse(logits(model), want) > 0.1


@pytest.mark.parametrize("name", ["lfm2", "nemotron_h_moe", "kimi-linear"])
def test_recurrent_layers_are_changed(name: str, tmp_path: Path) -> None:
    model = hybrid(name).write(tmp_path / "model.gguf")
    left = ("exps", "_b.weight", "inp")
    wanted = lambda name: not any(part in name for part in left)  # noqa: E731
    adapter = write_adapter(tmp_path / "a.gguf", model, wanted=wanted)
    merged = write_merged(tmp_path / "merged.gguf", model, (adapter, 1.0))
    want = logits(merged)
    assert nmse(logits(model, lora=[str(adapter)]), want) < 1e-5
    assert nmse(logits(model), want) > 0.1


@pytest.mark.parametrize("name", ["grok", "hy_v3", "phimoe"])
def test_experts_are_changed(name: str, tmp_path: Path) -> None:
    model = f32_copy(EXPERT_MODELS[name].write(tmp_path / "f16.gguf"), tmp_path / "model.gguf")
    adapter = write_adapter(tmp_path / "a.gguf", model)
    merged = write_merged(tmp_path / "merged.gguf", model, (adapter, 1.0))
    want = logits(merged)
    for device in ("cpu", "reference"):
        assert nmse(logits(model, lora=[str(adapter)], device=device), want) < 1e-5
    assert nmse(logits(model), want) > 0.1
    whole, alone = (logits(model, lora=[str(adapter)], n_batch=n) for n in (64, 1))
    assert np.array_equal(whole, alone)


@pytest.mark.parametrize("name", ADAPTED)
def test_logits_are_llama_cpps(name: str, tmp_path: Path) -> None:
    stored = json.loads((DATA / "llama_cpp_lora.json").read_text())[name]
    want = np.frombuffer(base64.b64decode(stored), np.float32).reshape(len(SHOWN), -1)
    model, adapters = write_adapted(name, tmp_path)
    got = logits(model, lora={str(path): scale for path, scale in adapters})[list(SHOWN)]
    plain = logits(model)[list(SHOWN)]
    assert nmse(got, want) < 1e-5
    assert nmse(plain, want) > 0.05


def test_quantised_adapters_and_those_without_alpha(tmp_path: Path) -> None:
    model = write_own("granite_swa", tmp_path / "model.gguf")
    kind = gguf.GGMLQuantizationType.Q8_0

    def wide(name: str) -> bool:
        return "attn_q." in name or "ffn_down" in name

    plain = write_adapter(tmp_path / "a.gguf", model, rank=32, alpha=32.0, wanted=wide)
    packed = write_adapter(
        tmp_path / "b.gguf", model, rank=32, alpha=None, wanted=wide, quantised=kind
    )
    got, want = logits(model, lora=str(packed)), logits(model, lora=str(plain))
    assert 0 < nmse(got, want) < 1e-3


def test_small_values_stay(tmp_path: Path) -> None:
    """B as it is after a few steps of training: far below what fp16 keeps all bits of."""
    model = write_own("granite_swa", tmp_path / "model.gguf")
    small = write_adapter(tmp_path / "a.gguf", model, size=2e-6, dtype=np.float32)
    large = write_adapter(tmp_path / "b.gguf", model, size=2e-1, dtype=np.float32)
    got = logits(model, lora={str(small): 1e4})
    want = logits(model, lora={str(large): 0.1})
    assert nmse(got, want) < 1e-7


CASES = {
    "another kind": ({"keys": {"general.type": "model"}}, "general.type is 'model'"),
    "another type": ({"keys": {"adapter.type": "ia3"}}, "adapter.type is 'ia3'"),
    "another architecture": ({"keys": {"general.architecture": "gemma"}}, "of a 'gemma' model"),
    "an infinite alpha": ({"alpha": float("inf")}, "adapter.lora.alpha"),
    "NaN": ({"size": float("nan")}, "NaN or infinite"),
    "activated": ({"activation": (1, 2)}, "activation tokens"),
    "nothing": ({"wanted": lambda name: False}, "changes no tensor"),
}


@pytest.mark.parametrize("case", CASES)
def test_files_that_are_refused(case: str, tmp_path: Path, tiny_model: Path) -> None:
    changes, message = CASES[case]
    adapter = write_adapter(tmp_path / "a.gguf", tiny_model, **changes)
    with pytest.raises(LocalKVError, match=message) as error:
        LLM(tiny_model, lora=str(adapter), progress=False)
    assert "\n" not in str(error.value)


def _rewritten(path: Path, source: Path, names: dict[str, str]) -> Path:
    """A copy of an adapter with other names of tensors; empty ones are left out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    for tensor in reader.tensors:
        if name := names.get(tensor.name, tensor.name):
            writer.add_tensor(name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_names_that_do_not_fit_are_named(tmp_path: Path, tiny_model: Path) -> None:
    whole = write_adapter(tmp_path / "a.gguf", tiny_model, wanted=lambda name: "attn_q" in name)
    first = "blk.0.attn_q.weight.lora_"
    cases = {
        "has no .lora_b beside it": {f"{first}b": ""},
        "none of an adapter's": {f"{first}b": "blk.0.attn_q.bias"},
        "changes a tensor that": {f"{first}{i}": f"blk.9.attn_q.weight.lora_{i}" for i in "ab"},
        r"'blk\.0\.ffn_up\.weight\.lora_b' has shape": {
            f"{first}{i}": f"blk.0.ffn_up.weight.lora_{i}" for i in "ab"
        },
    }
    for message, names in cases.items():
        with pytest.raises(LocalKVError, match=message):
            LLM(tiny_model, lora=str(_rewritten(tmp_path / "b.gguf", whole, names)), progress=False)
    with pytest.raises(LocalKVError, match="is an adapter"):
        LLM(whole, progress=False)


def test_what_can_not_be_changed_is_named(tmp_path: Path) -> None:
    model = write_own("minicpm3", tmp_path / "model.gguf")
    adapter = write_adapter(tmp_path / "a.gguf", model)
    with pytest.raises(LocalKVError, match=r"can't change 'blk\.0\.attn_kv_b\.weight'"):
        LLM(model, lora=str(adapter), progress=False)


def test_wrong_scales_and_numbers(tmp_path: Path, tiny_model: Path) -> None:
    adapter = str(write_adapter(tmp_path / "a.gguf", tiny_model))
    for lora in ({adapter: float("nan")}, {adapter: 1e9}):
        with pytest.raises(UsageError, match="the scale of the adapter"):
            LLM(tiny_model, lora=lora, progress=False)
    with pytest.raises(UsageError, match="is named twice"):
        LLM(tiny_model, lora=[adapter, adapter], progress=False)
    with LLM(tiny_model, lora=adapter, n_ctx=256, progress=False) as llm:
        for asked in ({1: 1.0}, {-1: 1.0}, {0: float("nan")}):
            with pytest.raises(UsageError, match="adapter"):
                llm.complete("Once", max_tokens=1, lora=asked)


def test_norms_are_left_out_with_a_warning(tmp_path: Path, tiny_model: Path) -> None:
    whole = write_adapter(tmp_path / "a.gguf", tiny_model, wanted=lambda name: "attn_q" in name)
    names = {
        "blk.1.attn_q.weight.lora_a": "",
        "blk.1.attn_q.weight.lora_b": "blk.1.attn_norm.weight",
    }
    with LLM(
        tiny_model,
        lora=str(_rewritten(tmp_path / "b.gguf", whole, names)),
        n_ctx=256,
        progress=False,
    ) as llm:
        assert any("1 norm in it" in line for line in llm.warnings)


def test_memory_is_counted_to_the_byte(tmp_path: Path, tiny_model: Path) -> None:
    adapter = write_adapter(tmp_path / "a.gguf", tiny_model, rank=5, embedding=True)
    with LLM(tiny_model, lora=str(adapter), n_ctx=256, progress=False) as llm:
        assert llm.engine.model.adapted is not None
        found, embedding = 0, llm.engine.model.adapted._embedding
        from localkv.kernels.layer_weights import Linear

        def count(part: object) -> int:
            if isinstance(part, Linear):
                parts = () if part.adapters is None else part.adapters.parts
                return sum(one.a.nbytes + one.b.nbytes + one.factor.nbytes for one in parts)
            fields = getattr(part, "__dataclass_fields__", {})
            items = part if isinstance(part, tuple) else [getattr(part, name) for name in fields]
            return sum(map(count, items))

        weights = llm.engine.model.adapted.weights
        found = count(weights.layers) + count(weights.output)
        found += sum(one.a.nbytes + one.b.nbytes for one in embedding)
        assert llm.memory.adapters == llm.lora_adapters[0].n_bytes == found
        assert llm.memory.total >= found


def test_fingerprints_know_values_and_alpha(tmp_path: Path, tiny_model: Path) -> None:
    paths = [tmp_path / f"{i}.gguf" for i in range(4)]
    for path, changes in zip(paths, ({}, {}, {"seed": 9}, {"alpha": 9.0}), strict=True):
        write_adapter(path, tiny_model, **changes)
    first, same, *others = [open_adapter(path).fingerprint() for path in paths]
    assert first == same
    assert len({first, *others}) == 3
