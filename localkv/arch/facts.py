"""A model file's header as the families read it: keys under the architecture's name, and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localkv.arch.ffn_spec import MoeSpec
from localkv.arch.norm_spec import NormSpec
from localkv.arch.rope_spec import RopeSpec
from localkv.errors import ModelFileError

ROPE_FREQS = "rope_freqs.weight"
SOFTMAX_GATING = 1
"""llama.cpp's `LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX`."""


class Keys(Protocol):
    """Metadata with getters that check types and ranges; see `loader/metadata.py`."""

    def get(self, key: str, /) -> object: ...
    def string(self, key: str, default: Any = ...) -> Any: ...
    def integer(self, key: str, default: Any = ...) -> Any: ...
    def integers(self, key: str, default: Any = ...) -> Any: ...
    def number(self, key: str, default: Any = ...) -> Any: ...
    def boolean(self, key: str, default: Any = ...) -> Any: ...


@dataclass(frozen=True)
class Facts:
    """A model file's header.

    Attributes:
        architecture: `general.architecture`, with which its keys begin.
        name: the model's, or the file's.
        keys: the metadata.
        shapes: of each tensor, by name.
    """

    architecture: str
    name: str
    keys: Keys
    shapes: Mapping[str, tuple[int, ...]]

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the metadata has a key of the architecture."""
        return self.keys.get(self.key(name)) is not None

    def integer(self, name: str, *default: int) -> int:
        return int(self.keys.integer(self.key(name), *default))

    def number(self, name: str, *default: float) -> float:
        return float(self.keys.number(self.key(name), *default))

    def same_in_all_layers(self, name: str, *default: int) -> int:
        """A count that some files give as one number per layer.

        Raises:
            ModelFileError: the layers differ.
        """
        if not isinstance(self.keys.get(self.key(name)), list):
            return self.integer(name, *default)
        counts = set(self.keys.integers(self.key(name)))
        if len(counts) != 1:
            raise ModelFileError(
                f"key {self.key(name)!r} differs between layers, which is not supported"
            )
        return int(counts.pop())

    @property
    def n_layers(self) -> int:
        return self.integer("block_count")

    @property
    def n_embd(self) -> int:
        return self.integer("embedding_length")

    @property
    def n_ctx_train(self) -> int:
        return self.integer("context_length")

    @property
    def n_vocab(self) -> int:
        if "token_embd.weight" not in self.shapes:
            raise ModelFileError("missing tensor 'token_embd.weight'")
        return self.shapes["token_embd.weight"][0]

    def heads(self) -> tuple[int, int, int]:
        """Heads, KV heads, and channels of a head, which are as many for K as for V.

        Raises:
            ModelFileError: they don't divide, or K and V differ.
        """
        n_heads = self.same_in_all_layers("attention.head_count")
        n_kv_heads = self.same_in_all_layers("attention.head_count_kv", n_heads)
        if n_heads % n_kv_heads:
            raise ModelFileError(f"{n_heads} heads can't share {n_kv_heads} KV heads evenly")
        head_dim = self.integer("attention.key_length", max(1, self.n_embd // n_heads))
        value_dim = self.integer("attention.value_length", head_dim)
        if head_dim != value_dim:
            raise ModelFileError(f"heads of different size for K ({head_dim}) and V ({value_dim})")
        return n_heads, n_kv_heads, head_dim

    def rms_norm(self, tensor: str) -> NormSpec:
        return NormSpec(tensor, "rms", self.number("attention.layer_norm_rms_epsilon"))

    def layer_norm(self, tensor: str) -> NormSpec:
        return NormSpec(tensor, "layer", self.number("attention.layer_norm_epsilon"))

    def rope(self, head_dim: int, *, interleaved: bool, divisors: bool = False) -> RopeSpec:
        """RoPE as the keys say.

        Args:
            divisors: the architecture takes `rope_freqs.weight`, if the file has it.

        Raises:
            ModelFileError: a value makes no sense, or a kind of scaling is not supported.
        """
        n_dims = self.integer("rope.dimension_count", head_dim)
        if n_dims > head_dim or n_dims % 2:
            raise ModelFileError(f"RoPE can't rotate {n_dims} channels of a head of {head_dim}")
        scaling = self.keys.string(self.key("rope.scaling.type"), default="linear")
        if scaling not in ("none", "linear", "yarn"):
            raise ModelFileError(
                f"RoPE scaling {scaling!r} is not supported", hint="supported: none, linear, yarn"
            )
        # files from 2023 give the linear factor under an older key; 0 stands for none
        old_factor = self.number("rope.scale_linear", 0.0)
        factor = 1.0
        if scaling != "none":
            factor = self.number("rope.scaling.factor", old_factor) or 1.0
        ext = self.number("rope.scaling.yarn_ext_factor", -1.0)
        if ext < 0:  # llama.cpp's way to say that the type of scaling decides
            ext = float(scaling == "yarn")
        return RopeSpec(
            n_dims=n_dims,
            theta=self.number("rope.freq_base", 10000.0),
            interleaved=interleaved,
            divisors=ROPE_FREQS if divisors and ROPE_FREQS in self.shapes else "",
            scaling="none" if scaling == "linear" and factor == 1.0 else scaling,
            factor=factor,
            original_context_length=self.integer(
                "rope.scaling.original_context_length", self.n_ctx_train
            ),
            magnitude=self._rope_magnitude(factor, ext),
            yarn_ext_factor=ext,
            yarn_beta_fast=self.number("rope.scaling.yarn_beta_fast", 32.0),
            yarn_beta_slow=self.number("rope.scaling.yarn_beta_slow", 1.0),
        )

    def _rope_magnitude(self, factor: float, ext_factor: float) -> float:
        """Factor on cos and sin: what llama.cpp's context and `ggml_rope_yarn` come to together."""

        def mscale(weight: float) -> float:
            return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

        attn_factor = self.number("rope.scaling.attn_factor", 1.0)
        if ext_factor == 0.0:
            return attn_factor * self.number("rope.scaling.yarn_attn_factor", 1.0)
        all_dims = self.number("rope.scaling.yarn_log_multiplier", 0.0)
        below = mscale(all_dims) if all_dims else 1.0
        if below <= 0:
            key = self.key("rope.scaling.yarn_log_multiplier")
            raise ModelFileError(f"key {key!r} is {all_dims}")
        return attn_factor * mscale(1.0) / below

    def experts(self, *, renormalise: bool = True, shared: bool = False) -> MoeSpec:
        """Routed experts as the keys say.

        Args:
            shared: the architecture has a shared expert.

        Raises:
            ModelFileError: a value makes no sense, or a way to choose experts is not supported.
        """
        n_experts = self.integer("expert_count")
        n_used = self.integer("expert_used_count")
        if n_used > n_experts:
            raise ModelFileError(f"{n_used} of {n_experts} experts can't be used")
        gating = self.integer("expert_gating_func", SOFTMAX_GATING)
        if gating not in (0, SOFTMAX_GATING):
            raise ModelFileError(f"expert gating function {gating} is not supported, only softmax")
        n_ff = self.integer("expert_feed_forward_length", 0)
        n_ff = n_ff or self.same_in_all_layers("feed_forward_length")
        n_ff_shared = 0
        if shared:
            default = self.same_in_all_layers("feed_forward_length", n_ff)
            n_ff_shared = self.integer("expert_shared_feed_forward_length", default)
        return MoeSpec(n_experts, n_used, n_ff, n_ff_shared, renormalise, shared_gated=shared)
