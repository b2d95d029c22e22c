"""A model file's header as the families read it: keys under the architecture's name, and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from localkv.arch.spec import LayerSpec, NormSpec, PredictionSpec, RopeSpec
from localkv.config import ROPE_SCALINGS
from localkv.errors import ModelFileError

ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


class Keys(Protocol):
    """Metadata with getters that check types and ranges; see `loader/metadata.py`."""

    def get(self, key: str, /) -> object: ...
    def string(self, key: str, default: Any = ...) -> Any: ...
    def integer(self, key: str, default: Any = ...) -> Any: ...
    def integers(self, key: str, default: Any = ...) -> Any: ...
    def number(self, key: str, default: Any = ...) -> Any: ...
    def boolean(self, key: str, default: Any = ...) -> Any: ...
    def booleans(self, key: str, default: Any = ...) -> Any: ...
    def numbers(self, key: str, default: Any = ...) -> Any: ...


@dataclass(frozen=True)
class Facts:
    """A model file's header.

    Attributes:
        architecture: `general.architecture`, with which its keys begin.
        name: the model's, or the file's.
        keys: the metadata.
        shapes: of each tensor, by name.
        counts_all: blocks that predict further tokens count as layers (`every_block`).
    """

    architecture: str
    name: str
    keys: Keys
    shapes: Mapping[str, tuple[int, ...]]
    counts_all: bool = False

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def has(self, name: str) -> bool:
        """Whether the metadata has a key of the architecture."""
        return self.keys.get(self.key(name)) is not None

    def integer(self, name: str, *default: int) -> int:
        return int(self.keys.integer(self.key(name), *default))

    def number(self, name: str, *default: float) -> float:
        return float(self.keys.number(self.key(name), *default))

    def boolean(self, name: str, *default: bool) -> bool:
        return bool(self.keys.boolean(self.key(name), *default))

    def per_layer(self, name: str, *default: int) -> tuple[int, ...]:
        """A count of each layer; a file may give one for all.

        Raises:
            ModelFileError: the file gives them for another number of layers.
        """
        if not isinstance(self.keys.get(self.key(name)), list):
            return (self.integer(name, *default),) * self.n_layers
        return tuple(self._of_layers(name, self.keys.integers(self.key(name))))

    def flags_per_layer(self, name: str) -> tuple[bool, ...]:
        """A switch of each layer.

        Raises:
            ModelFileError: the file gives them for another number of layers, or not at all.
        """
        return tuple(self._of_layers(name, self.keys.booleans(self.key(name))))

    def numbers_per_layer(self, name: str, *default: float) -> tuple[float, ...]:
        """A number of each layer; a file may give one for all.

        Raises:
            ModelFileError: the file gives them for another number of layers.
        """
        if not isinstance(self.keys.get(self.key(name)), list):
            return (self.number(name, *default),) * self.n_layers
        return tuple(self._of_layers(name, self.keys.numbers(self.key(name))))

    def _of_layers(self, name: str, values: list[Any]) -> list[Any]:
        n_blocks = self.n_layers + self.n_prediction_layers
        if len(values) not in (self.n_layers, n_blocks):
            raise ModelFileError(
                f"key {self.key(name)!r} has {len(values)} items for {self.n_layers} layers"
            )
        return values[: self.n_layers]

    def same_in_all_layers(self, name: str, *default: int) -> int:
        """A count that some files give as one number per layer.

        Raises:
            ModelFileError: the layers differ.
        """
        counts = set(self.per_layer(name, *default))
        if len(counts) != 1:
            raise ModelFileError(
                f"key {self.key(name)!r} differs between layers, which is not supported"
            )
        return counts.pop()

    @property
    def n_prediction_layers(self) -> int:
        """Blocks after the layers that predict further tokens (multi-token prediction)."""
        return 0 if self.counts_all else self.integer("nextn_predict_layers", 0)

    @property
    def predicts(self) -> bool:
        """Whether the file has a block that predicts a further token."""
        return f"blk.{self.n_layers}.nextn.eh_proj.weight" in self.shapes

    @property
    def every_block(self) -> Facts:
        """The header as if blocks that predict were layers, to read what it says of them."""
        return replace(self, counts_all=True)

    def prediction(
        self,
        layer: LayerSpec,
        *,
        norm: Callable[[str], NormSpec] | None = None,
        reads_normed: bool = True,
    ) -> PredictionSpec | None:
        """The first block that predicts further tokens; None if the file has none.

        Args:
            layer: the block's.
            norm: makes norms of their names; None for RMSNorm.
            reads_normed: see `PredictionSpec`.
        """
        if not self.predicts:
            return None
        last = "layer_output_norm"
        if f"blk.{self.n_layers}.{last}.weight" not in self.shapes:
            last = "nextn.shared_head_norm"
        norm = norm or self.rms_norm
        return PredictionSpec(
            block=self.n_layers,
            layer=layer,
            embedding_norm=norm("nextn.enorm"),
            hidden_norm=norm("nextn.hnorm"),
            output_norm=norm(last),
            reads_normed=reads_normed,
        )

    @property
    def n_layers(self) -> int:
        """Layers of the model itself.

        Raises:
            ModelFileError: there is none.
        """
        n_blocks, n_predict = self.integer("block_count"), self.n_prediction_layers
        if n_predict >= n_blocks:
            raise ModelFileError(f"none of {n_blocks} blocks is a layer: {n_predict} predict")
        return n_blocks - n_predict

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

    def heads(self, layer: int | None = None, *, alike: bool = True) -> tuple[int, int, int]:
        """Heads, KV heads, and channels of a head of K.

        Args:
            layer: the one that is meant where layers differ; None if they may not.
            alike: a head of V has to have as many.

        Raises:
            ModelFileError: they don't divide, or K and V differ.
        """
        query = self.per_layer("attention.head_count")
        n_heads = self._one("attention.head_count", query, layer)
        kv = self.per_layer("attention.head_count_kv", n_heads)
        n_kv_heads = self._one("attention.head_count_kv", kv, layer)
        if not n_heads or not n_kv_heads or n_heads % n_kv_heads:
            raise ModelFileError(f"{n_heads} heads can't share {n_kv_heads} KV heads evenly")
        head_dim = self.integer("attention.key_length", max(1, self.n_embd // max(1, query[0])))
        value_dim = self.integer("attention.value_length", head_dim)
        if alike and head_dim != value_dim:
            raise ModelFileError(f"heads of different size for K ({head_dim}) and V ({value_dim})")
        return n_heads, n_kv_heads, head_dim

    def _one(self, name: str, counts: tuple[int, ...], layer: int | None) -> int:
        return self.same_in_all_layers(name, *counts[:1]) if layer is None else counts[layer]

    def rms_norm(self, tensor: str) -> NormSpec:
        return NormSpec(tensor, "rms", self.number("attention.layer_norm_rms_epsilon"))

    def layer_norm(self, tensor: str) -> NormSpec:
        return NormSpec(tensor, "layer", self.number("attention.layer_norm_epsilon"))

    def rope(
        self,
        head_dim: int,
        *,
        interleaved: bool,
        divisors: bool = False,
        long_divisors: bool = False,
    ) -> RopeSpec:
        """RoPE as the keys say.

        Args:
            divisors: the architecture takes `rope_freqs.weight`, if the file has it.
            long_divisors: it takes LongRoPE's two tensors, if the file has them.

        Raises:
            ModelFileError: a value makes no sense, or a kind of scaling is not supported.
        """
        n_dims = self.integer("rope.dimension_count", head_dim)
        if n_dims > head_dim or n_dims % 2:
            raise ModelFileError(f"RoPE can't rotate {n_dims} channels of a head of {head_dim}")
        scaling = self.keys.string(self.key("rope.scaling.type"), default="linear")
        known = (*ROPE_SCALINGS, "longrope") if long_divisors else ROPE_SCALINGS
        if scaling not in known:
            raise ModelFileError(
                f"RoPE scaling {scaling!r} is not supported", hint=f"supported: {', '.join(known)}"
            )
        by_length = long_divisors and (scaling == "longrope" or LONG_FACTORS in self.shapes)
        scaling = "linear" if scaling == "longrope" else scaling
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
            divisors=self._divisors(divisors, by_length),
            long_divisors=LONG_FACTORS if by_length and ROPE_FREQS not in self.shapes else "",
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

    def _divisors(self, of_file: bool, by_length: bool) -> str:
        """The tensor that divides RoPE's frequencies, in a short context at least."""
        if of_file and ROPE_FREQS in self.shapes:
            return ROPE_FREQS
        return SHORT_FACTORS if by_length else ""

    def turns_sections(self) -> bool:
        """Whether RoPE has sections for text, height and width (M-RoPE).

        Text has the same position in all three, so that RoPE's pairs turn as without sections: they
        are (i, i + n_dims / 2). Pairs of a fourth section would not turn.

        Raises:
            ModelFileError: there is a fourth section.
        """
        sections = self.keys.integers(self.key("rope.dimension_sections"), None) or []
        if any(sections[3:]):
            key = self.key("rope.dimension_sections")
            raise ModelFileError(f"key {key!r} has a fourth section, which is not supported")
        return any(sections)

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
