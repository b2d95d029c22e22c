"""Mixers: the part of a layer in which a token reads those before it.

Attention keeps rows of K and V of each token (`cache/kv_cache.py`), a recurrent mixer a state of
constant size for each sequence (`cache/recurrent_state.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from localkv.arch.norm_spec import NormSpec
from localkv.arch.rope_spec import RopeSpec
from localkv.arch.state_spec import StateSpec


@dataclass(frozen=True)
class AttentionParams:
    """What attention of one layer does besides softmax(q . k) v.

    Attributes:
        softmax_scale: what q . k is multiplied with to become a logit.
        window: how many of the latest positions a token sees, itself included; 0 is all.
        softcap: cap * tanh(logit / cap) takes the logit's place, as in Gemma 2; 0 is no cap.
        chunk: a token sees from the last multiple of it on (Llama 4); 0 is no chunk.

    Raises:
        ValueError: one is negative, or there are both a window and a chunk.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0 or self.chunk < 0:
            raise ValueError(f"neither window, softcap nor chunk can be negative: {self}")
        if self.window and self.chunk:
            raise ValueError(f"a layer has a window or a chunk, not both: {self}")

    def first_visible(self, position: Any) -> Any:
        """The first position that the token at `position` sees, if it is not before 0; of a number
        or an array of any kind."""
        return first_visible(position, self.window, self.chunk)


def first_visible(position: Any, window: int, chunk: int) -> Any:
    """As `AttentionParams.first_visible`."""
    if window:
        return position - (window - 1)
    return position // chunk * chunk if chunk else position * 0


@dataclass(frozen=True)
class Temperature:
    """q grows with its position, by log(floor((position + offset) / length) + 1) * scale + 1
    (llama.cpp's `llm_graph_input_attn_temp`)."""

    scale: float
    length: int
    offset: int = 0


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
        q_norm, k_norm: norms of q and k, or None.
        norms_after_rope: they come after RoPE, not before it.
        v_norm: of each head of V, or None.
        sinks: the tensor with a logit for each head that joins the softmax without a value
            (Xiao et al. 2023; gpt-oss), or None.
        gated: `attn_q` has two parts for each head, q and a gate; attention's output is multiplied
            by sigmoid(gate) (Qwen3-Next).
        value_from_key: there is no `attn_v`: V is K before its norm and RoPE.
        kv_from: the layer whose K and V it reads, None for its own; then it has no
            `attn_k` and `attn_v` and stores nothing.
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
    norms_after_rope: bool = False
    v_norm: NormSpec | None = None
    sinks: str | None = None
    gated: bool = False
    value_from_key: bool = False
    kv_from: int | None = None

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.n_heads * self.value_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention whose K and V are one latent row for all heads (DeepSeek-V2, arXiv:2405.04434).

    The cache's row is the normed latent [latent_dim] and a rotated key [rope_dim]; V is the latent.

    Attributes:
        n_heads: heads of q.
        latent_dim, rope_dim: channels of a row's two parts.
        nope_dim, value_dim: channels of a head's key without RoPE, and of its value.
        q_lora_rank: width of the latent of q, 0 if q is projected at once.
        params: scale and softcap.
        rope: how the rotated part is rotated, or None.
        latent_norm, q_latent_norm: of the latents; the latter is None without a latent of q.
        temperature: how q grows with its position, or None.
    """

    n_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_lora_rank: int
    params: AttentionParams
    rope: RopeSpec | None
    latent_norm: NormSpec
    q_latent_norm: NormSpec | None = None
    temperature: Temperature | None = None

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.n_heads * self.value_dim


@dataclass(frozen=True)
class DeltaNetSpec:
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464), after a short convolution.

    Attributes:
        n_key_heads, n_value_heads: the one divides the other.
        head_dim: channels of a head of q, k and v; the state of a head is head_dim x head_dim.
        conv_kernel: tokens that the convolution of q, k and v sees.
        norm: of each head of the output.
        heads_in_turn: value head h uses key head h mod `n_key_heads`; else h div (`n_value_heads` /
            `n_key_heads`).
    """

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_kernel: int
    norm: NormSpec
    heads_in_turn: bool

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.n_value_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Of q, k and v, in this order."""
        return (2 * self.n_key_heads + self.n_value_heads) * self.head_dim

    @property
    def state(self) -> StateSpec:
        """A memory's rows are channels of k, its columns those of v."""
        memory = (self.n_value_heads, self.head_dim, self.head_dim)
        return StateSpec(self.conv_kernel - 1, self.conv_channels, memory)


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated convolution over the last few tokens (LFM2), `width` channels, `kernel` tokens."""

    width: int
    kernel: int

    @property
    def state(self) -> StateSpec:
        """Rows of what is convolved."""
        return StateSpec(self.kernel - 1, self.width)


@dataclass(frozen=True)
class Mamba2Spec:
    """State-space duality (Dao & Gu 2024, arXiv:2405.21060), after a short convolution.

    Attributes:
        n_heads, head_dim: of x; `n_heads * head_dim` is the inner width.
        state_dim: the state of a head is head_dim x state_dim.
        n_groups: heads of B and C.
        conv_kernel: tokens that the convolution of x, B and C sees.
        norm: of each group of the gated output, or None.
    """

    n_heads: int
    head_dim: int
    state_dim: int
    n_groups: int
    conv_kernel: int
    norm: NormSpec | None

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.n_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Of x, B and C, in this order."""
        return self.width + 2 * self.n_groups * self.state_dim

    @property
    def state(self) -> StateSpec:
        """A memory's rows are B's channels, its columns those of x."""
        memory = (self.n_heads, self.state_dim, self.head_dim)
        return StateSpec(self.conv_kernel - 1, self.conv_channels, memory)


RecurrentSpec = DeltaNetSpec | ShortConvSpec | Mamba2Spec
Mixer = AttentionSpec | LatentAttentionSpec | RecurrentSpec
