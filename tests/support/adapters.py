"""LoRA adapters with random values for a model's file, and models that such an adapter is merged
into: the same weights without any of the package's code."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

EMBEDDING = "token_embd.weight"
NOT_CHANGED = ("norm", "conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_dt", EMBEDDING)
"""Parts of the names of tensors that are no plain products."""


def write_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    alpha: float | None = 8.0,
    seed: int = 1,
    size: float = 0.2,
    wanted: Callable[[str], bool] = lambda name: True,
    embedding: bool = False,
    dtype: Any = np.float16,
    keys: dict[str, Any] | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
    activation: Sequence[int] = (),
) -> Path:
    """Write an adapter of a model's matrices.

    Args:
        alpha: None leaves the key out.
        size: of the values of B; A's keep rows as large as they were.
        wanted: which tensors it changes, by name.
        embedding: it changes the embedding, too.
        keys: instead of the usual strings.
        quantised: type of A and B.
        activation: tokens that switch it on.
    """
    reader = gguf.GGUFReader(model)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    writer = gguf.GGUFWriter(path, architecture)
    strings = {"general.type": "adapter", "adapter.type": "lora"}
    for key, value in {**strings, **(keys or {})}.items():
        writer.add_string(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if activation:
        writer.add_array("adapter.alora.invocation_tokens", [*activation])
    generator = np.random.default_rng(seed)
    for tensor in reader.tensors:
        *stack, n_out, n_in = [1, *map(int, tensor.shape[::-1])][-max(2, len(tensor.shape)) :]
        is_embedding = embedding and tensor.name == EMBEDDING
        plain = len(tensor.shape) > 1 and not any(part in tensor.name for part in NOT_CHANGED)
        if not is_embedding and not (plain and wanted(tensor.name)):
            continue
        a = generator.standard_normal((*stack, rank, n_in)) / n_in**0.5
        b = generator.standard_normal((*stack, n_out, rank)) * size
        pair = (b, np.swapaxes(a, -1, -2)) if is_embedding else (a, b)
        for name, values in zip("ab", pair, strict=True):
            values = np.ascontiguousarray(values, dtype)
            if quantised is not None:
                packed = gguf.quants.quantize(np.float32(values), quantised)
                writer.add_tensor(f"{tensor.name}.lora_{name}", packed, raw_dtype=quantised)
            else:
                writer.add_tensor(f"{tensor.name}.lora_{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_merged(
    path: Path, model: Path, *adapters: tuple[Path, float], alpha: float = 8.0
) -> Path:
    """Write a copy of a model whose matrices are F32, with adapters, by their scales, added."""
    shutil.copy(model, path)
    reader = gguf.GGUFReader(path, "r+")
    for adapter, scale in adapters:
        pairs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(adapter).tensors}
        for tensor in reader.tensors:
            if f"{tensor.name}.lora_a" not in pairs:
                continue
            a, b = (np.float64(pairs[f"{tensor.name}.lora_{one}"]) for one in "ab")
            more = scale * alpha / b.shape[-1] * (a @ b.T if tensor.name == EMBEDDING else b @ a)
            tensor.data[...] += np.float32(more).reshape(tensor.data.shape)
    return path


ADAPTED = ("granite_swa", "exaone", "falcon", "grok")
"""Models whose logits with adapters llama.cpp has given: split and whole q, k and v, experts."""


def write_adapted(name: str, folder: Path) -> tuple[Path, list[tuple[Path, float]]]:
    """Write a model of `ADAPTED`, and two adapters of it with their scales."""
    from support.expert_models import EXPERT_MODELS
    from support.own_models import OWN, write_own

    model = folder / "model.gguf"
    if name in OWN:
        write_own(name, model)
    else:
        EXPERT_MODELS[name].write(model)
    first = write_adapter(folder / "a.gguf", model)
    second = write_adapter(folder / "b.gguf", model, rank=7, alpha=3.5, seed=2)
    return model, [(first, 1.0), (second, -0.5)]
