"""Model files with one number changed to something that no real file holds."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from localkv.loader.metadata import OF_FILES, OF_MODELS
from support.gguf_bytes import ARRAY, F32, F64, I32, I64, U32, U64, Tensor, gguf_bytes
from support.hybrid_models import hybrid
from support.own_models import write_own
from support.random_model import MOE, YARN, RandomModel, variant
from support.tiny_model import write_tiny_model

INTEGERS = (
    *(0, -1, 1, 2, 3, 255, 2**12, 2**16, 2**24, 2**31 - 1, 2**31, -(2**31)),
    *(2**32 - 1, 2**32, 2**63 - 1, -(2**63)),
)
LARGE = (2**63, 2**64 - 1)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 1e-5, 1e-12, 1e-38, 1e-45, 1e-320, 5e-324, 1e10, 1e20, 3e38),
    *(1e300, -1e300, math.inf, -math.inf, math.nan),
)
TOKEN_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding", "fim_pre", "fim_rep")


@dataclass(frozen=True)
class Change:
    """One key's new value; an array gets it as its item in the middle."""

    key: str
    value_type: int
    value: float

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} as {gguf.GGUFValueType(self.value_type).name}"


@dataclass(frozen=True)
class Content:
    """A model file, taken apart."""

    metadata: Mapping[str, tuple[int, object]]
    tensors: tuple[Tensor, ...]

    def with_change(self, change: Change) -> bytes:
        metadata = dict(self.metadata)
        old_type, old = metadata.get(change.key, (change.value_type, None))
        if old_type == ARRAY:
            item_type, items = old
            items = list(items)
            items[len(items) // 2] = change.value
            # integers among floats would be refused for their type
            code = F64 if item_type in (F32, F64) else change.value_type
            metadata[change.key] = (ARRAY, (code, items))
        else:
            metadata[change.key] = (change.value_type, change.value)
        rows = [(key, kind, value) for key, (kind, value) in metadata.items()]
        return bytes(gguf_bytes(rows, list(self.tensors)).data)


def take_apart(path: Path) -> Content:
    """What a file holds, as `gguf_bytes` takes it."""
    reader = gguf.GGUFReader(path)
    metadata: dict[str, tuple[int, object]] = {}
    for key, entry in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        types = [int(kind) for kind in entry.types]
        value = entry.contents()
        metadata[key] = (ARRAY, (types[1], value)) if types[0] == ARRAY else (types[0], value)
    tensors = tuple(
        Tensor(t.name, tuple(map(int, t.shape)), int(t.tensor_type), np.asarray(t.data).tobytes())
        for t in reader.tensors
    )
    return Content(metadata, tensors)


def base_model(kind: str, folder: Path) -> Path:
    """A text model, or graphs that between them read every key."""
    path = folder / f"{kind}.gguf"
    if kind == "text":
        return write_tiny_model(path)
    sizes = {"n_layers": 1, "n_embd": 32, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "n_ff": 32}
    if kind == "experts":
        settings = {**MOE, "expert_feed_forward_length": 32}
        settings["expert_shared_feed_forward_length"] = 32
        biases = ("attn_q", "attn_k", "attn_v")
        return RandomModel("qwen2moe", biases=biases, settings=settings, **sizes).write(path)
    if kind in HYBRIDS:
        return hybrid(kind).write(path)
    if kind == "latent":
        return write_own("minicpm3", path)
    if kind in ("gemma3", "command-r"):
        return variant(kind, **sizes).write(path)
    if kind == "linear":
        settings = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
        return RandomModel("llama", settings=settings, **sizes).write(path)
    settings = {**YARN, **MOE, "attention.temperature_scale": 0.1}
    return RandomModel("mistral3", settings=settings, **sizes).write(path)


HYBRIDS = ("qwen35", "lfm2", "granitehybrid")
KINDS = ("text", "experts", "linear", "yarn", "gemma3", "command-r", "latent", *HYBRIDS)


def changes(kind: str, content: Content) -> Iterator[Change]:
    """Every number that a file may hold, at extremes and at the edges of what is allowed."""
    architecture = content.metadata["general.architecture"][1]
    keys = {f"{architecture}.{key}": limits for key, limits in OF_MODELS.items()}
    if kind == "text":
        keys |= OF_FILES
        for name in TOKEN_IDS:
            keys[f"tokenizer.ggml.{name}_token_id"] = None
    for key, limits in keys.items():
        edges = () if limits is None else (limits.least, limits.most)
        whole = [edge for edge in edges if math.isfinite(edge) and edge == int(edge)]
        for value in (*INTEGERS, *LARGE, *whole):
            yield Change(key, U64 if value > 2**63 - 1 else I64, int(value))
        for value in (*FLOATS, *map(float, edges)):
            yield Change(key, F64, value)
            if not math.isfinite(value) or abs(value) < 3.4e38:
                yield Change(key, F32, struct.unpack("<f", struct.pack("<f", value))[0])
        yield Change(key, U32, 7)
        yield Change(key, I32, -7)


def sampled(kind: str, content: Content, count: int | None) -> list[Change]:
    """All changes, or a number of them, the same each time: every other one is of a key that the
    file has."""
    every = list(changes(kind, content))
    if count is None:
        return every
    rng = random.Random(kind)
    there = [change for change in every if change.key in content.metadata]
    return [*rng.sample(there, count // 2), *rng.sample(every, count - count // 2)]
