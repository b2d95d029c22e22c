"""A model as data: a list of layers, each with its mixer, its feed-forward block and its norms.

The files of the families (`arch/llama.py`, ...) make these of a file's metadata. Everything above
reads them and knows no architecture's name: the forward pass, the loader, the backends, the cache
and the memory plan. Nothing here computes, and nothing imports an array library.

The definitions go from the small to the whole: norms and RoPE, then mixers, then feed-forward
blocks. What a layer does to the residual stream beyond these comes next, then a layer, and a model.

A mixer is the part of a layer in which a token reads those before it. Attention keeps rows of K and
V of each token (`cache/kv_cache.py`), a recurrent mixer a state of constant size for each sequence
(`cache/recurrent_state.py`). A feed-forward block works on each token by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class NormSpec:
    """A norm of rows.

    Attributes:
        tensor: the tensor of a layer or of the model whose `.weight` (and `.bias`, if it has one)
            it uses; empty for a norm without weights.
        kind: "rms" (Zhang & Sennrich 2019) or "layer" (Ba et al. 2016), which takes the mean off.
        eps: added to the mean square or the variance.
        span: the values of q or k that are normed together, and the weight's shape. With "head"
            each head is normed by one weight [channels]. With "heads" each is normed by its own,
            [heads, channels]. With "row" all heads are normed together by a weight [heads *
            channels].
        biased: an RMSNorm takes the file's bias, too (Phi 3.5 MoE), as every LayerNorm does.
    """

    tensor: str
    kind: Literal["rms", "layer"]
    eps: float
    span: Literal["head", "heads", "row"] = "head"
    biased: bool = False


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding, as `<arch>.rope.*` of a GGUF file describes it.

    Attributes:
        n_dims: leading channels of a head that are rotated; the others pass through.
        theta: base of the frequencies, `theta ** (-2 i / n_dims)`.
        interleaved: channel pairs are (2i, 2i+1), ggml's NORM; otherwise (i, i + n_dims / 2),
            ggml's NEOX.
        divisors: the tensor that divides the frequencies (`rope_freqs.weight` of Llama 3.1), or
            empty.
        n_divisors: how many values it has, of which the first `n_dims / 2` are used; 0 if it has no
            others.
        long_divisors: the tensor that does so in a context of more tokens than
            `original_context_length` (LongRoPE, Ding et al. 2024), or empty.
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
    divisors: str = ""
    n_divisors: int = 0
    long_divisors: str = ""
    scaling: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    magnitude: float = 1.0
    yarn_ext_factor: float = 0.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0

    def divisors_in(self, n_ctx: int) -> str:
        """The tensor that divides the frequencies in a context of `n_ctx` tokens, or empty.

        It is chosen once for a context, so that all keys of a cache are rotated alike.
        """
        if self.long_divisors and n_ctx > self.original_context_length:
            return self.long_divisors
        return self.divisors


@dataclass(frozen=True)
class StateSpec:
    """What one recurrent layer remembers of one sequence so far, in float32.

    Attributes:
        n_rows, n_channels: the last rows that a convolution read, one fewer than it sees.
        memory: heads, rows and columns of the matrix that each head keeps; empty where a layer has
            nothing but a convolution.
    """

    n_rows: int
    n_channels: int
    memory: tuple[int, int, int] | tuple[()] = ()

    @property
    def n_floats(self) -> tuple[int, int]:
        """Floats of the rows, and of the memory."""
        return self.n_rows * self.n_channels, math.prod(self.memory) if self.memory else 0


@dataclass(frozen=True)
class LayerState:
    """A layer of a model, and the state that it has."""

    layer: int
    state: StateSpec


@dataclass(frozen=True)
class AttentionParams:
    """What attention of one layer does in addition to softmax(q . k) v.

    Attributes:
        softmax_scale: what q . k is multiplied with to become a logit.
        window: how many of the latest positions a token sees, itself included; 0 is all.
        softcap: cap * tanh(logit / cap) takes the logit's place, as in Gemma 2; 0 is no cap.
        chunk: a token sees from the last multiple of it on (Llama 4); 0 is no chunk.
        alibi: a logit is less by a head's slope times the distance (ALiBi, Press et al. 2021,
            arXiv:2108.12409), where slopes end at 2^-alibi; 0 is no such bias.

    Raises:
        ValueError: one is negative, or there are both a window and a chunk.
    """

    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    chunk: int = 0
    alibi: float = 0.0

    def __post_init__(self) -> None:
        if self.window < 0 or self.softcap < 0 or self.chunk < 0:
            raise ValueError(f"neither window, softcap nor chunk can be negative: {self}")
        if self.window and self.chunk:
            raise ValueError(f"a layer has a window or a chunk, not both: {self}")

    def slopes(self, n_heads: int) -> list[float]:
        """ALiBi's slope of each head; heads beyond a power of two lie between the others."""
        n = 1 << n_heads.bit_length() - 1
        slopes = [2.0 ** (-self.alibi * (i + 1) / n) for i in range(n)]
        return slopes + [2.0 ** (-self.alibi * (i + 0.5) / n) for i in range(n_heads - n)]

    def first_visible(self, position: Any) -> Any:
        """The first position that the token at `position` sees, if it is not before 0; `position`
        is a number or an array of any kind."""
        return first_visible(position, self.window, self.chunk)


def first_visible(position: Any, window: int, chunk: int) -> Any:
    """See `AttentionParams.first_visible`."""
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


GateActivation = Literal["sigmoid", "softplus"]
"""What makes factors of attention's output of a gate."""


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
            by the gate's activation (Qwen3-Next).
        head_gated: `attn_gate` has a row for each head, by whose activation all channels of the
            head's output are multiplied (Step 3.5).
        gate_activation: of either kind of gate.
        output_scale: factor on attention's output (MiMo V2).
        clamp: q, k and v are at least its negative and at most this as they are projected (OLMo);
            0 leaves them.
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
    head_gated: bool = False
    gate_activation: GateActivation = "sigmoid"
    output_scale: float = 1.0
    clamp: float = 0.0
    value_from_key: bool = False
    kv_from: int | None = None

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.n_heads * self.value_dim

    @property
    def stored_value_dim(self) -> int:
        """Channels of a head of V in the cache, where heads of V that are narrower than K's end in
        zeros."""
        return max(self.key_dim, self.value_dim)


@dataclass(frozen=True)
class EncoderAttentionSpec:
    """Attention in which a token sees those after it, too, of its own text; nothing is stored.

    Attributes:
        attention: heads, scale, RoPE, and norms of q and k. A window of n tokens reaches n // 2
            positions to each side.
    """

    attention: AttentionSpec

    @property
    def rope(self) -> RopeSpec | None:
        """How q and k are rotated, or None."""
        return self.attention.rope

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.attention.width


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
        head_gated: `attn_gate` has a row for each head, by whose sigmoid the head's output is
            multiplied (Ling 3).
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
    head_gated: bool = False

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
        gate_activation: of the gate of the output.
        fades_by_channel: each row of a memory fades at its own rate, not all alike (Kimi Delta
            Attention, Kimi Team 2025, arXiv:2510.26692).
        least_log_decay: the logarithm of a decay is this number times a sigmoid; 0 if a softplus
            makes it.
        low_rank: values of the latents that decays and the gate are made of; 0 if there are none.
    """

    n_key_heads: int
    n_value_heads: int
    head_dim: int
    conv_kernel: int
    norm: NormSpec
    heads_in_turn: bool
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    fades_by_channel: bool = False
    least_log_decay: float = 0.0
    low_rank: int = 0

    @property
    def width(self) -> int:
        """Values per token of its output, before the output matrix."""
        return self.n_value_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of q, k and v, in this order."""
        return (2 * self.n_key_heads + self.n_value_heads) * self.head_dim

    @property
    def state(self) -> StateSpec:
        """A memory's rows are channels of k, its columns channels of v."""
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
        """Channels of x, B and C, in this order."""
        return self.width + 2 * self.n_groups * self.state_dim

    @property
    def state(self) -> StateSpec:
        """A memory's rows are channels of B, its columns channels of x."""
        memory = (self.n_heads, self.state_dim, self.head_dim)
        return StateSpec(self.conv_kernel - 1, self.conv_channels, memory)


RecurrentSpec = DeltaNetSpec | ShortConvSpec | Mamba2Spec
Mixer = AttentionSpec | EncoderAttentionSpec | LatentAttentionSpec | RecurrentSpec


Activation = Literal["silu", "gelu", "relu", "relu2", "xielu", "swiglu_oai"]
"""GELU is its tanh form (Hendrycks & Gimpel 2016); "relu2" is relu(x)^2 (So et al. 2021); "xielu"
(Huang & Schlag 2024) has parameters for each layer; "swiglu_oai" is gpt-oss's clamped
x sigmoid(1.702 x) (up + 1), which exists only gated."""

Gating = Literal["softmax", "sigmoid", "softmax_of_chosen", "sqrt_softplus"]
"""How the router's logits become the experts' shares; see `MoeSpec.gating`."""


@dataclass(frozen=True)
class XieluParams:
    """Expanded integral of ELU (Huang & Schlag 2024, arXiv:2411.13010), with
    alpha_p = softplus(`alpha_p`) and alpha_n = beta + softplus(`alpha_n`):

    alpha_p x^2 + beta x for x > 0, else alpha_n (expm1(min(x, eps)) - x) + beta x.
    """

    alpha_p: float
    alpha_n: float
    beta: float
    eps: float


@dataclass(frozen=True)
class MlpSpec:
    """A feed-forward block: down(activation(gate(x)) * up(x)), `n_ff` wide.

    Attributes:
        gated: there is a gate; else down(activation(up(x))).
        xielu: parameters of that activation, None with others.
        sparsity: the gate's values are diminished by their mean and this many standard deviations
            per token, and those that are negative then become 0, before the activation (Gemma 3n);
            0 leaves them.
        limit: the activation's values are at most this, and the values of `up` between its
            negative and it, before they are multiplied (Step 3.5); 0 leaves them.
        limits_gate: what the activation reads is at most `limit`, not what it gives (Maple).
    """

    n_ff: int
    activation: Activation = "silu"
    gated: bool = True
    xielu: XieluParams | None = None
    sparsity: float = 0.0
    limit: float = 0.0
    limits_gate: bool = False


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts (llama.cpp's `build_moe_ffn`).

    Attributes:
        n_experts, n_experts_used: how many there are, and how many each token is sent to.
        n_ff: hidden width of one expert.
        n_ff_shared: hidden width of the shared expert, 0 if there is none.
        renormalise: the selected experts' weights are divided by their sum.
        gating: how the router's logits become shares: by the "softmax" over all experts, the
            "sigmoid" of each, or the "sqrt_softplus" of each. With "softmax_of_chosen" experts are
            chosen by their logits, and the softmax is over the chosen ones.
        selection_bias: `exp_probs_b.bias` is added to the shares for the choice only.
        n_groups, n_groups_used: experts are chosen from the best groups, each rated by the sum of
            its two best experts; 1 is no groups.
        weights_scale: factor on the weights.
        shared_suffix: what names of the shared expert's tensors end in.
        shared_scale: factor on the shared expert's output.
        shared_gated: the shared expert's output is multiplied by a sigmoid of the token.
        activation: of the experts, and of the shared one.
        gated: experts have a gate, as the shared one.
        biased: router and experts must have biases; elsewhere a file may have them.
        router_reads_input: the router reads the layer's input, before any norm (SmallThinker).
        weighs_input: an expert's weight multiplies what it reads, not what it gives (Llama 4).
        router_norm: of what the router reads, by weights `<tensor>.scale` / sqrt(n_embd), or None
            (Gemma 4).
        limit, shared_limit: of the experts, and of the shared one (`MlpSpec.limit`).
        limits_gate: see `MlpSpec`.
        latent_dim: values of the latent that routed experts read and give, 0 if they read the row
            itself (Nemotron 3 Super).
    """

    n_experts: int
    n_experts_used: int
    n_ff: int
    n_ff_shared: int = 0
    renormalise: bool = True
    gating: Gating = "softmax"
    selection_bias: bool = False
    n_groups: int = 1
    n_groups_used: int = 1
    weights_scale: float = 1.0
    shared_suffix: str = "_shexp"
    shared_scale: float = 1.0
    shared_gated: bool = False
    activation: Activation = "silu"
    gated: bool = True
    biased: bool = False
    router_reads_input: bool = False
    weighs_input: bool = False
    router_norm: NormSpec | None = None
    limit: float = 0.0
    shared_limit: float = 0.0
    limits_gate: bool = False
    latent_dim: int = 0

    @property
    def expert(self) -> MlpSpec:
        """The block that each expert is."""
        return self._block(self.n_ff, self.limit)

    @property
    def shared(self) -> MlpSpec:
        """The block that the shared expert is."""
        return self._block(self.n_ff_shared, self.shared_limit)

    def _block(self, n_ff: int, limit: float) -> MlpSpec:
        return MlpSpec(n_ff, self.activation, self.gated, limit=limit, limits_gate=self.limits_gate)


@dataclass(frozen=True)
class MlpAndMoeSpec:
    """A dense block and routed experts side by side (Gemma 4).

    Attributes:
        mlp, moe: both read the block's input.
        post_mlp_norm, post_moe_norm: of what each gives, before they are added.
        moe_norm: of what the experts read, which is not the layer's `ffn_norm`.
    """

    mlp: MlpSpec
    moe: MoeSpec
    post_mlp_norm: NormSpec
    post_moe_norm: NormSpec
    moe_norm: NormSpec


Ffn = MlpSpec | MoeSpec | MlpAndMoeSpec


PER_LAYER_ROWS = "per_layer_token_embd.weight"
"""This tensor may be a model's largest; only the rows of tokens are read, by the host."""


@dataclass(frozen=True)
class PerLayerInputSpec:
    """Each layer has an embedding of its own, whose row it reads after its feed-forward block.

    After llama.cpp's `src/models/gemma3n.cpp`; x0 is the scaled embedding, t a token, D its width.

    e = (norm(per_layer_model_proj x0 / sqrt(D)) + sqrt(P) per_layer_token_embd[t]) / sqrt(2), P
    values for each layer; a layer adds post_norm(proj (gelu(inp_gate x) * e)).

    Attributes:
        width: P.
        norm: the model's `per_layer_proj_norm`, of P values.
        post_norm: the layer's.
    """

    width: int
    norm: NormSpec
    post_norm: NormSpec


@dataclass(frozen=True)
class LaurelSpec:
    """A learned residual of low rank beside attention (Menghani et al. 2024, arXiv:2411.07501).

    n is the mixer's normed input: n + norm(laurel_r laurel_l n) joins the sum after the mixer,
    which is divided by sqrt(2).

    Attributes:
        rank: rows of `laurel_l`.
        norm: `laurel_post_norm`.
    """

    rank: int
    norm: NormSpec


@dataclass(frozen=True)
class AltUpSpec:
    """Alternating updates of several residual streams (Baykal et al. 2023, arXiv:2301.13310).

    A layer works on the first stream as predicted from all, and corrects all by what it did.

    Attributes:
        n_streams: how many there are.
        router_norm: norm of what each layer's router reads.
    """

    n_streams: int
    router_norm: NormSpec


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer, then a feed-forward block, each added to the residual stream.

    Attributes:
        mixer: attention, or what has its place; None in a layer that has only the other block.
        ffn: dense or routed; None in a layer that has only a mixer.
        attn_norm, ffn_norm: before each; None reads x as it is.
        post_attn_norm, post_ffn_norm: after each, before it is added; or None.
        mixed_norm, hidden_norm: before the mixer's output matrix, and before the last matrix of a
            dense block (BitNet); or None.
        attn_sum_norm, ffn_sum_norm: after each, of the sum; or None.
        attn_norm_2: of the sum of what `attn_sum_norm` gives and the layer's input, or None.
        beside: a second mixer, which reads what the first one reads; both are added (Falcon-H1).
        parallel: the feed-forward block reads the layer's input, as the mixer does, not the sum.
        residual_scale: factor on what each block adds.
        output_scale: the tensor [1] with a factor on the layer's output, or None.
        per_layer_input: added after the feed-forward block, or None.
        laurel: beside the mixer, or None.
    """

    mixer: Mixer | None
    ffn: Ffn | None
    attn_norm: NormSpec | None
    ffn_norm: NormSpec | None
    post_attn_norm: NormSpec | None = None
    post_ffn_norm: NormSpec | None = None
    mixed_norm: NormSpec | None = None
    hidden_norm: NormSpec | None = None
    attn_sum_norm: NormSpec | None = None
    attn_norm_2: NormSpec | None = None
    ffn_sum_norm: NormSpec | None = None
    beside: Mixer | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    output_scale: str | None = None
    per_layer_input: PerLayerInputSpec | None = None
    laurel: LaurelSpec | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, which has to be attention of grouped queries."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def moe(self) -> MoeSpec | None:
        """Its routed experts, if it has some."""
        match self.ffn:
            case MlpAndMoeSpec(moe=moe) | (MoeSpec() as moe):
                return moe
        return None

    @property
    def mlp(self) -> MlpSpec | None:
        """Its dense block, if it has one."""
        match self.ffn:
            case MlpAndMoeSpec(mlp=mlp) | (MlpSpec() as mlp):
                return mlp
        return None

    @property
    def n_ff(self) -> int:
        """The widest hidden row of its feed-forward block, 0 if it has none."""
        mlp, moe = self.mlp, self.moe
        return max(mlp.n_ff if mlp else 0, moe.n_ff if moe else 0, moe.n_ff_shared if moe else 0)


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches are alike.

    Attributes:
        n_kv_heads, key_dim, value_dim: of each layer.
        window: positions that its tokens see, or 0 for all.
        layers: their indices.
        chunk: its tokens see from the last multiple of it on, or 0.
        is_latent: K's rows are latents, and V is a view of them. The rotated parts of keys are in
            V's place (`LatentAttentionSpec`).
    """

    n_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    layers: tuple[int, ...]
    chunk: int = 0
    is_latent: bool = False

    @property
    def reach(self) -> int:
        """Rows that a token may see, its own included; 0 for all before it."""
        return self.window or self.chunk


@dataclass(frozen=True)
class PredictionSpec:
    """A block that predicts a further token (multi-token prediction, DeepSeek-V3, arXiv:2412.19437,
    section 2.2).

    With h, the normed output of the model's layers for a token, and e, the embedding of the token
    after it, the block's layer works on x = eh_proj [norm(e), norm(h)]. The normed output of the
    layer makes logits of the token that follows, and is the h of that token's prediction. In some
    architectures h is each time the output before its norm.

    Attributes:
        block: its number among the file's blocks.
        layer: its layer.
        embedding_norm, hidden_norm: of e and of h.
        output_norm: of the layer's output; a file without its tensor has the model's.
        reads_normed: h is normed.
    """

    block: int
    layer: LayerSpec
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    output_norm: NormSpec
    reads_normed: bool = True


@dataclass(frozen=True)
class ClassifierSpec:
    """A head that scores a text, or two of which one may answer the other (llama.cpp's
    `build_pooling`).

    h, the hidden state that is read, becomes norm(activation(cls h)) and then scores,
    cls.output h; a file may have either matrix alone.

    Attributes:
        pooling: which hidden state it is: the "mean", the first token's ("cls") or the "last"
            one's.
        n_hidden: rows of `cls`, 0 if there is none.
        n_classes: rows of `cls.output`, 0 if there is none.
        activation: of what `cls` gives.
        norm: of that, or None.
        is_softmax: scores are probabilities.
    """

    pooling: Literal["mean", "cls", "last"]
    n_hidden: int
    n_classes: int
    activation: Literal["tanh", "gelu"] = "tanh"
    norm: NormSpec | None = None
    is_softmax: bool = False


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
        ignored_tensors: what names of tensors begin with that the file may have and text does not
            need, such as blocks that predict further tokens.
        altup: there are several residual streams, or None.
        prediction: the block that predicts a further token, or None.
        n_positions: rows of `position_embd`, one for each position, which are added to the rows of
            the embedding; 0 if there is none.
        n_token_types: rows of `token_types`, of which the first is added, too; or 0.
        embedding_norm: of the sum, or None.
        classifier: a head that scores texts, or None.
        dense: names and rows of the matrices that embeddings are multiplied with after their
            pooling, one after the other.
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
    ignored_tensors: tuple[str, ...] = ()
    altup: AltUpSpec | None = None
    prediction: PredictionSpec | None = None
    n_positions: int = 0
    n_token_types: int = 0
    embedding_norm: NormSpec | None = None
    classifier: ClassifierSpec | None = None
    dense: tuple[tuple[str, int], ...] = ()

    @cached_property
    def is_encoder(self) -> bool:
        """Whether it reads texts and writes none: tokens see those after them."""
        return any(isinstance(layer.mixer, EncoderAttentionSpec) for layer in self.kinds)

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor of the file is none that text needs."""
        return tensor.startswith(self.ignored_tensors)

    @cached_property
    def predictor(self) -> ModelSpec:
        """The block that predicts, as a model of one layer."""
        assert self.prediction is not None
        own = self.prediction
        return replace(self, layers=(own.layer,), output_norm=own.output_norm, prediction=None)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers with K and V of their own by what their caches need, in the order of each
        group's first layer."""
        found = dict[CacheGroup, list[int]]()
        for i, layer in enumerate(self.layers):
            if (group := _cache_group(layer.mixer)) is not None:
                found.setdefault(group, []).append(i)
        return tuple(replace(group, layers=tuple(layers)) for group, layers in found.items())

    @cached_property
    def states(self) -> tuple[LayerState, ...]:
        """The states of the recurrent layers, in order."""
        return tuple(
            LayerState(i, mixer.state)
            for i, layer in enumerate(self.layers)
            for mixer in (layer.mixer, layer.beside)
            if isinstance(mixer, (DeltaNetSpec, ShortConvSpec, Mamba2Spec))
        )

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """Each layer that differs from all before it."""
        different_objects = {id(layer): layer for layer in self.layers}
        return tuple(dict.fromkeys(different_objects.values()))

    @cached_property
    def per_layer_input(self) -> PerLayerInputSpec | None:
        """The per-layer input of its layers, which all have it or none."""
        return self.layers[0].per_layer_input

    @property
    def has_experts(self) -> bool:
        return any(layer.moe is not None for layer in self.kinds)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Each way in which layers rotate q and k."""
        found = (getattr(layer.mixer, "rope", None) for layer in self.kinds)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))


def _cache_group(mixer: Mixer | None) -> CacheGroup | None:
    """The group of a layer, without layers; None for one that stores no rows."""
    match mixer:
        case AttentionSpec(kv_from=None):
            params = mixer.params
            return CacheGroup(
                mixer.n_kv_heads,
                mixer.key_dim,
                mixer.stored_value_dim,
                params.window,
                (),
                params.chunk,
            )
        case LatentAttentionSpec():
            return CacheGroup(1, mixer.latent_dim, mixer.rope_dim, 0, (), is_latent=True)
    return None
