"""A model as data: a list of layers, each with its mixer, its feed-forward block and its norms.

The files of the families (`arch/llama.py`, ...) make these of a file's metadata. Everything above
reads them and knows no architecture's name: the forward pass, the loader, the backends, the cache
and the memory plan. Nothing here computes, and nothing imports an array library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, as `<arch>.rope.*` of a GGUF file describes it.

    Attributes:
        n_dims: leading channels of a head that are rotated; the others pass through.
        theta: base of the frequencies, `theta ** (-2 i / n_dims)`.
        interleaved: channel pairs are (2i, 2i+1), ggml's NORM; otherwise (i, i + n_dims / 2),
            ggml's NEOX.
        has_divisors: the tensor `rope_freqs.weight` divides the frequencies (Llama 3.1).
        scaling: "none", "linear" or "yarn".
        factor: how many times the original context the scaled one is.
        original_context_length: context length before scaling (YaRN's correction range).
        magnitude: factor on cos and sin; 1 except with YaRN (llama.cpp: `rope_attn_factor` times
            YaRN's mscale).
        yarn_ext_factor, yarn_beta_fast, yarn_beta_slow: YaRN's ramp (Peng et al. 2023,
            section 3.2).
    """

    n_dims: int
    theta: float = 10000.0
    interleaved: bool = True
    has_divisors: bool = False
    scaling: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    magnitude: float = 1.0
    yarn_ext_factor: float = 0.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0


@dataclass(frozen=True)
class NormSpec:
    """A norm of rows.

    Attributes:
        tensor: of a layer or of the model, whose `.weight` (and `.bias`, if it has one) it uses.
        kind: "rms" (Zhang & Sennrich 2019) or "layer" (Ba et al. 2016), which takes the mean off.
        eps: added to the mean square or the variance.
    """

    tensor: str
    kind: Literal["rms", "layer"]
    eps: float


@dataclass(frozen=True)
class AttentionParams:
    """What attention of one layer does besides softmax(q . k) v.

    Attributes:
        softmax_scale: what q . k is multiplied with to become a logit.
        window: how many of the latest positions a token sees, itself included; 0 is all.
        softcap: cap * tanh(logit / cap) takes the logit's place, as in Gemma 2; 0 is no cap.

    Raises:
        ValueError: `window` or `softcap` is negative.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0:
            raise ValueError(f"neither window nor softcap can be negative: {self}")


@dataclass(frozen=True)
class Temperature:
    """q grows with its position, by log(floor(position / length) + 1) * scale + 1 (llama.cpp)."""

    scale: float
    length: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of grouped queries.

    Attributes:
        n_heads, n_kv_heads: heads of q, and of K and V; the one is a multiple of the other.
        key_dim, value_dim: channels of a head of q and K, and of a head of V.
        params: scale, window and softcap.
        rope: how q and k are rotated, or None.
        temperature: how q grows with its position, or None.
        qkv_bias: q, k and v must have biases; elsewhere a file may have them.
        q_norm, k_norm: norms of each head, before RoPE, or None.
        sinks: the tensor with a logit for each head that joins the softmax without a value
            (Xiao et al. 2023; gpt-oss), or None.
    """

    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int
    params: AttentionParams
    rope: RopeSpec | None = None
    temperature: Temperature | None = None
    qkv_bias: bool = False
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    sinks: str | None = None


Activation = Literal["silu", "gelu"]
"""GELU is its tanh form (Hendrycks & Gimpel 2016)."""


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward block: down(activation(gate(x)) * up(x)), `n_ff` wide."""

    n_ff: int
    activation: Activation = "silu"


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts.

    Attributes:
        n_experts, n_experts_used: how many there are, and how many each token is sent to.
        n_ff: hidden width of one expert.
        n_ff_shared: hidden width of the shared expert, 0 if there is none.
        renormalise: the selected experts' weights are divided by their sum.
    """

    n_experts: int
    n_experts_used: int
    n_ff: int
    n_ff_shared: int = 0
    renormalise: bool = True


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then a feed-forward block, each added to the residual stream.

    Attributes:
        attention: its mixer.
        ffn: dense or routed.
        attn_norm, ffn_norm: before each; None reads x as it is.
        post_attn_norm, post_ffn_norm: after each, before it is added; or None.
        parallel: the feed-forward block reads the layer's input, as attention does, not the sum.
        residual_scale: factor on what each block adds.
    """

    attention: AttentionSpec
    ffn: MlpSpec | MoeSpec
    attn_norm: NormSpec | None
    ffn_norm: NormSpec | None
    post_attn_norm: NormSpec | None = None
    post_ffn_norm: NormSpec | None = None
    parallel: bool = False
    residual_scale: float = 1.0

    @property
    def n_ff(self) -> int:
        """The widest hidden row of its feed-forward block."""
        return max(self.ffn.n_ff, self.ffn.n_ff_shared if isinstance(self.ffn, MoeSpec) else 0)


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches are alike.

    Attributes:
        n_kv_heads, key_dim, value_dim: of each layer.
        window: positions that its tokens see, or 0 for all.
        layers: their indices.
    """

    n_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and constants of one model.

    Attributes:
        architecture, name: as the file says.
        n_embd, n_vocab: width of the residual stream, and tokens of the vocabulary.
        n_ctx_train: tokens of context that it was trained for.
        layers: in order.
        output_norm: before the output matrix.
        embedding_scale: factor on the rows of the embedding.
        logit_scale: factor on the logits.
        logit_softcap: cap * tanh(logit / cap) takes their place; 0 is no cap.
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    layers: tuple[LayerSpec, ...]
    output_norm: NormSpec
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers by what their caches need, in the order of each group's first layer."""
        found = dict[tuple[int, int, int, int], list[int]]()
        for i, layer in enumerate(self.layers):
            spec = layer.attention
            key = spec.n_kv_heads, spec.key_dim, spec.value_dim, spec.params.window
            found.setdefault(key, []).append(i)
        return tuple(CacheGroup(*key, tuple(layers)) for key, layers in found.items())

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """Each layer that differs from all before it."""
        different_objects = {id(layer): layer for layer in self.layers}
        return tuple(dict.fromkeys(different_objects.values()))

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, MoeSpec) for layer in self.kinds)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Each way in which layers rotate q and k."""
        found = (layer.attention.rope for layer in self.kinds)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def has_divisors(self) -> bool:
        """Whether some layer's RoPE takes `rope_freqs.weight`."""
        return any(rope.has_divisors for rope in self.ropes)
