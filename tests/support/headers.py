"""Headers of files of every architecture, without the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec
from localkv.errors import ModelFileError
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.known_models import KNOWN_MODELS
from localkv.loader.metadata import Metadata
from localkv.loader.weights import listed_tensors
from localkv.quant_formats import FORMATS
from support.dense_variants import DENSE
from support.encoder_models import ENCODERS
from support.hybrid_models import KEYS as HYBRIDS
from support.hybrid_models import hybrid
from support.random_model import VARIANTS, RandomModel


class _Tensors(Mapping[str, TensorInfo]):
    """Tensors in F32 of these shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __getitem__(self, name: str) -> TensorInfo:
        return TensorInfo(name, self.shapes[name], FORMATS["f32"], 0, 0, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass
class Header:
    """A `ModelHeader` whose keys and shapes can be changed.

    Attributes:
        keys: by full name.
        shapes: of tensors, by name.
    """

    architecture: str
    keys: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return Path(f"{self.architecture}.gguf")

    @property
    def metadata(self) -> Metadata:
        named = {"general.architecture": self.architecture, **self.keys}
        return Metadata(named, self.path.name)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return _Tensors(self.shapes)

    def spec(self) -> ModelSpec:
        facts = Facts(self.architecture, "", self.metadata, self.shapes)
        return ARCHS[self.architecture](facts)

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"


def _of_random_model(arguments: dict[str, Any]) -> Header:
    model = RandomModel(**arguments)
    shapes = {name: values.shape for name, values in model.stored_tensors().items()}
    return Header(model.arch, model.keys(), shapes)


_DENSE = {
    "block_count": 6,
    "context_length": 1024,
    "embedding_length": 128,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.sliding_window": 64,
    "logit_scale": 2.0,
}
_EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 64,
    "expert_shared_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "interleave_moe_layer_step": 1,
    "leading_dense_block_count": 1,
}
_LATENT = {
    "rope.dimension_count": 32,
    "attention.key_length": 160,
    "attention.value_length": 128,
    "attention.kv_lora_rank": 128,
    "attention.q_lora_rank": 96,
    "attention.key_length_mla": 96,
    "attention.value_length_mla": 64,
    "attention.head_count_kv": 1,
    "expert_weights_scale": 1.5,
}
_RECURRENT = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0, 2, 0, 2]}
_WINDOWS = {
    "attention.sliding_window_pattern": [False, True, True, False, True, True],
    "swiglu_clamp_exp": 0.5,
}
_MORE = (
    _EXPERTS,
    {**_EXPERTS, **_WINDOWS},
    _WINDOWS,
    {**_EXPERTS, "expert_gating_func": 2},
    {},
    {**_EXPERTS, **_LATENT},
    {**_LATENT, "attention.key_length": 96, "attention.head_count_kv": 4},
    {**_EXPERTS, **_RECURRENT, "expert_gating_func": 2},
)
"""Keys of any architecture that no shape is known of."""


def header_of(architecture: str) -> Header:
    """A sound header of a small model, or of the smallest that is well known."""
    header = _header_of(architecture)
    return replace(header, keys=dict(header.keys), shapes=dict(header.shapes))


@cache
def _header_of(architecture: str) -> Header:
    for arguments in (*DENSE.values(), *VARIANTS.values()):
        if arguments.get("arch", "llama") == architecture:
            return _of_random_model(arguments)
    if architecture in ENCODERS:
        encoder = ENCODERS[architecture]()
        keys = {encoder.key(name): value for name, value in encoder.all_keys().items()}
        tensors = {name: values.shape for name, values in encoder.tensors.items()}
        return Header(architecture, keys, tensors)
    if architecture in HYBRIDS:
        model = hybrid(architecture)
        keys = {f"{architecture}.{key}": value for key, value in model.all_keys().items()}
        return Header(architecture, keys, {n: values.shape for n, values in model.tensors.items()})
    known = [known for known in KNOWN_MODELS.values() if known.architecture == architecture]
    if not known:
        return _made_up(architecture)
    shape = min(known, key=lambda known: known.keys["block_count"])
    keys = {f"{architecture}.{key}": value for key, value in shape.keys.items()}
    embedding = {"token_embd.weight": (shape.n_vocab, shape.keys["embedding_length"])}
    header = Header(architecture, keys, {**embedding, **shape.tensors})
    header.shapes |= dict(listed_tensors(header.spec(), shape.has))
    return header


def _made_up(architecture: str) -> Header:
    """One of whose keys the architecture takes what it wants."""
    for more in _MORE:
        keys = {f"{architecture}.{key}": value for key, value in {**_DENSE, **more}.items()}
        header = Header(architecture, keys, {"token_embd.weight": (96, 128)})
        with suppress(ModelFileError):
            header.shapes |= dict(listed_tensors(header.spec(), lambda name: "ffn_gate" in name))
            return header
    raise ValueError(f"no header of {architecture} is known")
