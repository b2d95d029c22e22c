"""The weights of one layer, as the operations take them. Fields bear their GGUF tensors' names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from localkv.arch.spec import NormSpec
from localkv.cache.arrays import Array
from localkv.kernels.low_rank import Adapters
from localkv.quant_formats.packed_tensor import PackedTensor


@dataclass(frozen=True)
class Norm:
    """A norm and its weight: float32 [n], as its bias, if it has one (`NormSpec`)."""

    spec: NormSpec
    weight: Array
    bias: Array | None = None


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias, and what adapters add; weight [n_out, n_in] packed, bias float32
    [n_out] or None."""

    weight: PackedTensor
    bias: Array | None = None
    adapters: Adapters | None = None


@dataclass(frozen=True)
class AttentionWeights:
    """Attention of grouped queries; see `AttentionSpec`.

    Attributes:
        attn_q: of each head q, and then its gate where the specification is gated.
        attn_k, attn_v: None where another layer's K and V are read; V also where it is K.
        output: `attn_output`.
        attn_q_norm, attn_k_norm, v_norm: float32 weights; `v_norm` has ones.
        sinks: float32 [n_heads], a logit each.
        attn_gate: [n_heads, n_embd], a gate for each head, or None.
    """

    attn_q: Linear
    attn_k: Linear | None
    attn_v: Linear | None
    output: Linear
    attn_q_norm: Norm | None = None
    attn_k_norm: Norm | None = None
    v_norm: Norm | None = None
    sinks: Array | None = None
    attn_gate: Linear | None = None


@dataclass(frozen=True)
class LatentAttentionWeights:
    """Multi-head latent attention; see `LatentAttentionSpec`.

    Attributes:
        attn_q: [n_heads * (nope + rope), n_embd], or of the latent of q.
        attn_q_a, attn_q_a_norm: make the latent of q, or None.
        attn_gate: [n_heads, n_embd], a gate for each head, or None.
        attn_kv_a_mqa: [latent + rope, n_embd].
        attn_kv_a_norm: of the latent.
        attn_k_b: packed [n_heads, latent, nope], from q's part without RoPE to latents.
        attn_v_b: packed [n_heads, value, latent], from a latent to values.
        output: `attn_output`.
    """

    attn_q: Linear
    attn_kv_a_mqa: Linear
    attn_kv_a_norm: Norm
    attn_k_b: PackedTensor
    attn_v_b: PackedTensor
    output: Linear
    attn_q_a: Linear | None = None
    attn_q_a_norm: Norm | None = None
    attn_gate: Linear | None = None


@dataclass(frozen=True)
class DeltaNetWeights:
    """Gated delta rule; see `DeltaNetSpec`. S is `head_dim`.

    Attributes:
        attn_qkv: [2 * n_key_heads * S + n_value_heads * S, n_embd]: q, k, v; or, where these are
            of several types in the file, only q.
        attn_k, attn_v: the others then, or None.
        attn_gate: [n_value_heads * S, n_embd]: z.
        ssm_beta, ssm_alpha: [n_value_heads, n_embd]; alpha has S rows for each head where memories
            fade by channel.
        ssm_f_a, ssm_g_a: [low_rank, n_embd], make the latents that `ssm_alpha` and `attn_gate`
            read, or None.
        ssm_conv1d: float32 [channels of q, k and v, conv_kernel].
        ssm_dt: float32, as many as alpha has rows, added to alpha.
        ssm_a: float32 [n_value_heads], -exp(A_log); exp(A_log) where decays have a lower bound.
        ssm_norm: of each head of the output.
        output: `ssm_out`.
    """

    attn_qkv: Linear
    attn_gate: Linear
    ssm_beta: Linear
    ssm_alpha: Linear
    ssm_conv1d: Array
    ssm_dt: Array
    ssm_a: Array
    ssm_norm: Norm
    output: Linear
    attn_k: Linear | None = None
    attn_v: Linear | None = None
    ssm_f_a: Linear | None = None
    ssm_g_a: Linear | None = None


@dataclass(frozen=True)
class ShortConvWeights:
    """LFM2's gated convolution; see `ShortConvSpec`.

    Attributes:
        in_proj: [3 * width, n_embd]: b, c and the values.
        conv: float32 [width, kernel].
        output: `shortconv.out_proj`.
    """

    in_proj: Linear
    conv: Array
    output: Linear


@dataclass(frozen=True)
class Mamba2Weights:
    """State-space duality; see `Mamba2Spec`.

    Attributes:
        ssm_in: [2 * width + 2 * n_groups * state_dim + n_heads, n_embd]: z; x, B and C; dt.
        ssm_conv1d: float32 [channels of x, B and C, conv_kernel].
        ssm_conv1d_bias: float32 [channels of x, B and C], or None.
        ssm_dt: float32 [n_heads], added to dt.
        ssm_a: float32 [n_heads], -exp(A_log).
        ssm_d: float32 [n_heads], how much of x goes on as it is.
        ssm_norm: of each group of the output, float32 [width], or None.
        output: `ssm_out`.
    """

    ssm_in: Linear
    ssm_conv1d: Array
    ssm_conv1d_bias: Array | None
    ssm_dt: Array
    ssm_a: Array
    ssm_d: Array
    ssm_norm: Norm | None
    output: Linear


RecurrentWeights = DeltaNetWeights | ShortConvWeights | Mamba2Weights
MixerWeights = AttentionWeights | LatentAttentionWeights | RecurrentWeights


@dataclass(frozen=True)
class MlpWeights:
    """A feed-forward block: down(activation(gate(x)) * up(x)); see `MlpSpec`."""

    ffn_gate: Linear | None
    ffn_up: Linear
    ffn_down: Linear


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts; see `MoeSpec`.

    Attributes:
        ffn_gate_inp: the router, [n_experts, n_embd].
        ffn_gate_exps, ffn_up_exps: packed [n_experts, n_ff, n_embd]; there is no gate where the
            specification has none.
        ffn_down_exps: packed [n_experts, n_embd, n_ff].
        ffn_gate_up_exps: packed [n_experts, 2 * n_ff, n_embd], in place of gate and up.
        shared: an expert that sees every token, or None.
        ffn_gate_inp_shexp: float32 [n_embd], its sigmoid gate, or None.
        exp_probs_b: float32 [n_experts], added for the choice, or None.
        gate_bias, up_bias, down_bias, gate_up_bias: float32 [n_experts, n_out] of the experts'
            products, or None.
        router_norm: of what the router reads, or None.
        down_scale: float32 [n_experts], factors on the experts' output, or None.
        gate_adapters, up_adapters, down_adapters, gate_up_adapters: what adapters add to the
            experts' products, or None.
        ffn_latent_down, ffn_latent_up: [latent_dim, n_embd] and [n_embd, latent_dim], to the latent
            that experts read and from the one they give, or None; the experts' matrices have
            `latent_dim` in place of n_embd then.
    """

    ffn_gate_inp: Linear
    ffn_gate_exps: PackedTensor | None
    ffn_up_exps: PackedTensor | None
    ffn_down_exps: PackedTensor
    shared: MlpWeights | None = None
    ffn_gate_inp_shexp: Array | None = None
    exp_probs_b: Array | None = None
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None
    router_norm: Norm | None = None
    down_scale: Array | None = None
    ffn_gate_up_exps: PackedTensor | None = None
    gate_up_bias: Array | None = None
    gate_adapters: Adapters | None = None
    up_adapters: Adapters | None = None
    down_adapters: Adapters | None = None
    gate_up_adapters: Adapters | None = None
    ffn_latent_down: Linear | None = None
    ffn_latent_up: Linear | None = None


@dataclass(frozen=True)
class MlpAndMoeWeights:
    """A dense block and routed experts side by side; see `MlpAndMoeSpec`."""

    mlp: MlpWeights
    moe: MoeWeights
    post_mlp_norm: Norm
    post_moe_norm: Norm
    moe_norm: Norm


FfnWeights = MlpWeights | MoeWeights | MlpAndMoeWeights


@dataclass(frozen=True)
class PerLayerInputWeights:
    """`inp_gate` [P, n_embd] and `proj` [n_embd, P]; see `PerLayerInputSpec`."""

    inp_gate: Linear
    proj: Linear
    post_norm: Norm


@dataclass(frozen=True)
class LaurelWeights:
    """`laurel_l` [rank, n_embd], `laurel_r` [n_embd, rank]; see `LaurelSpec`."""

    laurel_l: Linear
    laurel_r: Linear
    post_norm: Norm


@dataclass(frozen=True)
class AltUpWeights:
    """AltUp of S streams; see `AltUpSpec`.

    Attributes:
        router: [S, n_embd].
        router_norm: of what it reads.
        predict_coef: float32 [S * S, S].
        correct_coef: float32 [S, S].
        correct_scale: float32 [n_embd], factors on what the per-layer input reads.
    """

    router: Linear
    router_norm: Norm
    predict_coef: Array
    correct_coef: Array
    correct_scale: Array


@dataclass(frozen=True)
class LayerWeights:
    """One layer: a mixer, then a feed-forward block.

    Whatever `LayerSpec` has not is None; `output_scale` is a number. A block at another place than
    its layer is `apart`, with the norms around it, and `ffn` is None.
    """

    mixer: MixerWeights | None
    ffn: FfnWeights | None
    attn_norm: Norm | None
    ffn_norm: Norm | None
    post_attn_norm: Norm | None = None
    post_ffn_norm: Norm | None = None
    mixed_norm: Norm | None = None
    hidden_norm: Norm | None = None
    attn_sum_norm: Norm | None = None
    attn_norm_2: Norm | None = None
    ffn_sum_norm: Norm | None = None
    output_scale: float = 1.0
    per_layer_input: PerLayerInputWeights | None = None
    laurel: LaurelWeights | None = None
    altup: AltUpWeights | None = None
    beside: MixerWeights | None = None
    apart: LayerWeights | None = None

    @property
    def attention(self) -> AttentionWeights:
        """The mixer, which has to be attention of grouped queries."""
        assert isinstance(self.mixer, AttentionWeights)
        return self.mixer

    @property
    def moe(self) -> MoeWeights | None:
        """Its routed experts, if it has some."""
        match self.ffn if self.apart is None else self.apart.ffn:
            case MlpAndMoeWeights(moe=moe) | (MoeWeights() as moe):
                return moe
        return None


def tensors_of(part: Any) -> Iterator[PackedTensor | Array]:
    """All tensors in a part of the weights, one that is there twice twice."""
    if isinstance(part, PackedTensor) or hasattr(part, "nbytes"):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from tensors_of(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from tensors_of(getattr(part, field.name))


@dataclass(frozen=True)
class PerLayerTable:
    """Per-layer embeddings; P values for each of its L layers.

    Attributes:
        token_embd: `per_layer_token_embd` [n_vocab, L * P], as it lies in the mapped file: it may
            be the largest tensor, and only rows of tokens are read, by the host.
        model_proj: [L * P, n_embd].
        proj_norm: of P values.
    """

    token_embd: PackedTensor
    model_proj: Linear
    proj_norm: Norm


@dataclass(frozen=True)
class AltUpProjections:
    """AltUp's, both [n_embd, n_embd] for each stream but the first.

    Attributes:
        proj: make the streams of the embedding.
        unembd_proj: make them alike again, after the last layer.
    """

    proj: tuple[Linear, ...]
    unembd_proj: tuple[Linear, ...]
