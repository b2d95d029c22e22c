"""What the families' tables say of Hugging Face's checkpoints: which keys and tensors become which.

A table (`CHECKPOINTS` in a family's file) has an entry for each class of models in `config.json`.
Its functions read the configuration, and change weights by the operations of `Weight`; most leave
them as they are. The converter finds GGUF's names of tensors by gguf-py's `TensorNameMap`, and
compares what it made with what the family's functions read of a file.

After llama.cpp's `conversion/base.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeAlias

from localkv.errors import ModelFileError, quoted

Value: TypeAlias = int | float | str | bool | list[int] | list[float] | list[bool] | list[str]
"""A value of a key: an int becomes 32 bits without a sign, a float 32 bits."""

Keys: TypeAlias = dict[str, Value]
"""Values by the part of a key after the architecture's name."""

MOST_LAYERS, MOST_SIZE, MOST_TOKENS = 1 << 12, 1 << 22, (1 << 31) - 1
"""Bounds of a configuration: lists of these lengths are made before a tensor confirms them."""


class Weight(Protocol):
    """A tensor of a checkpoint, or what is made of one; nothing is read until it is written."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def rows(self, order: Sequence[int]) -> Self:
        """Some rows (the axis before the last) or items of a vector, in this order."""
        ...

    def columns(self, order: Sequence[int]) -> Weight:
        """Some items of each row, in this order."""
        ...

    def reshaped(self, shape: tuple[int, ...]) -> Weight: ...

    def transposed(self) -> Weight:
        """The last two axes in the other order."""
        ...

    def plus(self, term: float) -> Weight: ...

    def as_decay(self) -> Weight:
        """-exp(x): what a recurrent layer's decay is used as, of its logarithm."""
        ...


Named: TypeAlias = Iterable[tuple[str, Weight]]


class Config:
    """The values of `config.json`; the values of the part for text stand beside the others.

    Args:
        values: the file's.
        n_predicting: blocks after the layers that predict further tokens, as the tensors show.

    Raises:
        ModelFileError: by its methods, if a value is missing or of another type.
    """

    PARTS = ("text_config", "llm_config", "lm_config", "language_config")

    def __init__(self, values: Mapping[str, Any], n_predicting: int = 0) -> None:
        self.n_predicting = n_predicting
        self.values = dict(values)
        for part in self.PARTS:
            if isinstance(own := values.get(part), dict):
                self.values |= own

    def get(self, *names: str) -> Any:
        """The first value that is there and not null; else None."""
        return next((v for n in names if (v := self.values.get(n)) is not None), None)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self._found(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        most = MOST_TOKENS if "position" in names[0] else MOST_SIZE
        if type(value) is not int or not -1 <= value <= most:
            raise self._mismatch(names[0], value, f"an integer up to {most}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._found(names, default)
        if type(value) not in (int, float):
            raise self._mismatch(names[0], value, "a number")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self._found(names, default)
        if type(value) is not bool:
            raise self._mismatch(names[0], value, "true or false")
        return value

    def string(self, *names: str, default: str | None = None) -> str:
        value = self._found(names, default)
        if not isinstance(value, str):
            raise self._mismatch(names[0], value, "a string")
        return value

    def strings(self, name: str) -> list[str]:
        return self._list(name, str, "strings")

    def integers(self, name: str) -> list[int]:
        return self._list(name, int, "integers")

    def table(self, name: str) -> dict[str, Any]:
        """A nested object; an empty one if it isn't there."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._mismatch(name, value, "an object")
        return value

    def _list(self, name: str, kind: type, what: str) -> list[Any]:
        value = self._found((name,), None)
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self._mismatch(name, value, f"a list of {what}")
        return value

    def _found(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise ModelFileError(f"config.json: missing {quoted(names[0])}")
        return value

    def _mismatch(self, name: str, value: object, expected: str) -> ModelFileError:
        return ModelFileError(
            f"config.json: {quoted(name)} is {quoted(str(value))}, expected {expected}"
        )

    @property
    def n_layers(self) -> int:
        n_layers = self.integer("num_hidden_layers", "n_layers", "n_layer", "num_layers")
        if not 0 < n_layers <= MOST_LAYERS:
            raise ModelFileError(f"config.json: {n_layers} layers, expected 1 to {MOST_LAYERS}")
        return n_layers

    @property
    def n_heads(self) -> int:
        return max(1, self.integer("num_attention_heads", "n_head", "n_heads"))

    @property
    def n_kv_heads(self) -> int:
        return max(1, self.integer("num_key_value_heads", "n_kv_heads", default=self.n_heads))

    @property
    def head_dim(self) -> int:
        n_embd = self.integer("hidden_size", "n_embd", "dim")
        return self.integer("head_dim", default=n_embd // self.n_heads)

    @property
    def rope(self) -> dict[str, Any]:
        """RoPE's parameters. The parameters of layers of several kinds are under `full_attention`
        and `sliding_attention`. Older files have them beside other values."""
        rope = self.get("rope_parameters", "rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self._mismatch("rope_parameters", rope, "an object")
        if "full_attention" in rope or "sliding_attention" in rope:
            return rope
        rope = dict(rope)
        local = self.get(
            "local_rope_theta",
            "rope_local_theta",
            "rope_theta_local",
            "swa_rope_theta",
            "rope_local_base_freq",
        )
        if local is not None:
            rope["sliding_attention"] = {"rope_theta": local}
        if "type" in rope:
            rope.setdefault("rope_type", rope["type"])
        theta = self.get(
            "global_rope_theta",
            "rope_global_theta",
            "rope_theta_global",
            "rope_theta",
            "rotary_emb_base",
        )
        factor = self.get("partial_rotary_factor", "rope_pct", "rope_percent")
        original = self.get("original_max_position_embeddings")
        for name, value in (
            ("rope_theta", theta),
            ("partial_rotary_factor", factor),
            ("original_max_position_embeddings", original),
        ):
            if value is not None:
                rope.setdefault(name, value)
        return rope

    @property
    def full_rope(self) -> Config:
        """RoPE's parameters in layers that see everything."""
        rope = self.rope
        part = rope.get("full_attention", rope)
        if not isinstance(part, dict):
            raise self._mismatch("rope_parameters", part, "an object")
        return Config(part)

    @property
    def layer_types(self) -> list[str]:
        """Each layer's kind, as transformers names it."""
        types = self.strings("layer_types")
        if len(types) != self.n_layers:
            raise ModelFileError(
                f"config.json: layer_types has {len(types)} items for {self.n_layers} layers"
            )
        return types

    @property
    def has_window(self) -> list[bool]:
        return [kind == "sliding_attention" for kind in self.layer_types]


_NAMES = {
    "context_length": (
        "max_position_embeddings",
        "n_ctx",
        "n_positions",
        "max_length",
        "max_sequence_length",
        "model_max_length",
    ),
    "embedding_length": ("hidden_size", "n_embd", "dim"),
    "feed_forward_length": (
        "prefix_dense_intermediate_size",
        "dense_intermediate_size",
        "intermediate_size",
        "n_inner",
        "hidden_dim",
    ),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "n_kv_heads"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
}
"""Keys of most architectures, and where the configuration has them; the first that is there."""
_EPSILONS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
}
GATING = {"softmax": 1, "sigmoid": 2}
"""`expert_gating_func` by transformers' names."""


def common_keys(config: Config) -> Keys:
    """Keys that most architectures have, as far as the configuration says something of them."""
    keys: Keys = {"block_count": config.n_layers}
    for key, names in _NAMES.items():
        if config.get(*names) is not None:
            keys[key] = config.integer(*names)
    for key, names in _EPSILONS.items():
        if config.get(*names) is not None:
            keys[key] = config.number(*names)
    if config.get("is_causal") is False:
        keys["attention.causal"] = False
    gating = config.get("score_function", "scoring_func", "score_func", "moe_router_activation")
    if gating is not None:
        if gating not in GATING:
            raise ModelFileError(f"config.json: experts are chosen by {quoted(str(gating))}")
        keys["expert_gating_func"] = GATING[gating]
    return keys | rope_keys(config)


def rope_keys(config: Config) -> Keys:
    """RoPE's base and scaling.

    Raises:
        ModelFileError: a kind of scaling is not known.
    """
    keys: Keys = {}
    rope = config.full_rope
    kind = rope.string("rope_type", default="default").lower()
    if kind in ("linear", "yarn") and rope.has("factor"):
        keys["rope.scaling.type"] = kind
        keys["rope.scaling.factor"] = rope.number("factor")
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.integer(
            "original_max_position_embeddings"
        )
        for key, names in (
            ("ext_factor", ("extrapolation_factor",)),
            ("attn_factor", ("attention_factor", "attn_factor")),
            ("beta_fast", ("beta_fast",)),
            ("beta_slow", ("beta_slow",)),
        ):
            if rope.get(*names) is not None:
                keys[f"rope.scaling.yarn_{key}"] = rope.number(*names)
    elif kind in ("su", "longrope"):
        keys["rope.scaling.type"] = "longrope"
    elif kind not in ("default", "linear", "llama3", "dynamic", "proportional"):
        raise ModelFileError(f"config.json: RoPE scaling {quoted(kind)} is not supported")
    if rope.has("mrope_section"):
        keys["rope.dimension_sections"] = [*rope.integers("mrope_section"), 0, 0, 0, 0][:4]
    if rope.has("rope_theta"):
        keys["rope.freq_base"] = rope.number("rope_theta")
    swa = config.rope.get("sliding_attention")
    if isinstance(swa, dict) and "rope_theta" in swa:
        keys["rope.freq_base_swa"] = Config(swa).number("rope_theta")
    return keys


def rope_dimensions(config: Config, default: float = 1.0) -> int:
    """Channels of a head that rotate; `default` is their share where nothing is said of it."""
    return int(config.head_dim * config.full_rope.number("partial_rotary_factor", default=default))


def moe_keys(config: Config) -> Keys:
    """Keys of models with experts, beside the common ones, as far as the configuration has them."""
    keys = common_keys(config)
    for key, name in (
        ("expert_feed_forward_length", "moe_intermediate_size"),
        ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
        ("expert_shared_count", "n_shared_experts"),
        ("leading_dense_block_count", "first_k_dense_replace"),
    ):
        if config.has(name):
            keys[key] = config.integer(name)
    if config.has("routed_scaling_factor"):
        keys["expert_weights_scale"] = config.number("routed_scaling_factor")
    if config.flag("norm_topk_prob"):
        keys["expert_weights_norm"] = True
    return keys


def no_tensors(config: Config) -> dict[str, Sequence[float]]:
    return {}


def llama3_divisors(config: Config) -> dict[str, Sequence[float]]:
    """What divides RoPE's frequencies in Llama 3.1 (transformers' `rope_type` "llama3")."""
    rope = config.full_rope
    if rope.string("rope_type", default="default").lower() != "llama3":
        return {}
    base, n_dims = rope.number("rope_theta", default=10000.0), config.head_dim
    factor = rope.number("factor", default=8.0)
    low = rope.number("low_freq_factor", default=1.0)
    high = rope.number("high_freq_factor", default=4.0)
    trained = rope.number("original_max_position_embeddings", default=8192)
    if low == high or not base > 0 or not factor:
        raise ModelFileError("config.json: RoPE's scaling of kind 'llama3' makes no sense")
    divisors = []
    for i in range(0, n_dims, 2):
        turns = trained / (2 * math.pi * base ** (i / n_dims))  # of the pair in that context
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(factor)
        else:
            share = (turns - low) / (high - low)
            divisors.append(1 / ((1 - share) / factor + share))
    return {"rope_freqs.weight": divisors}


def as_they_are(config: Config, name: str, weight: Weight) -> Named:
    yield name, weight


def neighbours(n_heads: int, n_rows: int) -> list[int]:
    """The order of rows of q or k in which the pairs that RoPE turns are neighbours: checkpoints
    have the halves of each head one after the other."""
    if n_rows % (2 * n_heads):
        raise ModelFileError(f"{n_rows} rows of q or k are not {n_heads} heads of pairs")
    size = n_rows // n_heads
    pair = [j * (size // 2) + i for i in range(size // 2) for j in range(2)]
    return [head * size + i for head in range(n_heads) for i in pair]


def with_neighbours(config: Config, name: str, weight: Weight) -> Named:
    """q and k in the order of `neighbours`."""
    for part, n_heads in (("q_proj", config.n_heads), ("k_proj", config.n_kv_heads)):
        if name.endswith((f".{part}.weight", f".{part}.bias")):
            n_rows = weight.shape[0]
            weight = weight.rows(neighbours(n_heads, n_rows))
    yield name, weight


def with_split_experts(config: Config, name: str, weight: Weight) -> Named:
    """Gates and what they gate, which transformers keeps in one tensor of all experts."""
    base = name.removesuffix(".weight")
    if base.endswith("experts.gate_up_proj"):
        half = weight.shape[-2] // 2
        base = base.removesuffix("gate_up_proj")
        yield f"{base}gate_proj.weight", weight.rows(range(half))
        yield f"{base}up_proj.weight", weight.rows(range(half, 2 * half))
    elif base.endswith("experts.down_proj"):
        yield f"{base}.weight", weight
    else:
        yield name, weight


def with_one_added(config: Config, name: str, weight: Weight) -> Named:
    """Norms whose weights are 1 + w, as files hold them."""
    yield name, weight.plus(1.0) if name.endswith("norm.weight") else weight


@dataclass(frozen=True)
class Checkpoint:
    """How the checkpoints of one class of models are read.

    Attributes:
        architecture: `general.architecture` of the file.
        keys: the architecture's metadata.
        weights: called with each tensor's name, and gives what it becomes: names are those that
            `TensorNameMap` knows, or GGUF's.
        added: values of tensors that only the file has, by name.
        vocabulary: keys after `tokenizer.ggml.` that the tokenizer's files don't say.
        special: texts of special tokens, by the name in their key ("bos" for `bos_token_id`); the
            tokenizer's files come first.
        pre_tokenizer: llama.cpp's name of it, where several cut alike.
        left_out: beginnings of names of tensors that text has no use for.
        renamed: parts of names that are replaced before all else.
        predicts: the file has the blocks that predict further tokens; else they are left out.
    """

    architecture: str
    keys: Callable[[Config], Keys] = common_keys
    weights: Callable[[Config, str, Weight], Named] = as_they_are
    added: Callable[[Config], Mapping[str, Sequence[float]]] = no_tensors
    vocabulary: Callable[[Config], Mapping[str, bool]] = lambda config: {}
    special: Mapping[str, str] = field(default_factory=dict)
    pre_tokenizer: str = ""
    left_out: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    predicts: bool = False
