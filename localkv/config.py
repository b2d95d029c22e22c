"""Facts about a model and a cache, as frozen dataclasses.

Nothing here computes, and nothing here imports torch: these are the values that the loader fills
in, that the user chooses, and that every layer above passes down unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from localkv.errors import UsageError


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, as `<arch>.rope.*` of a GGUF file describes it.

    Attributes:
        n_dims: leading channels of a head that are rotated; the others pass through.
        theta: base of the frequencies, `theta ** (-2 i / n_dims)`.
        scaling: "none", "linear" or "yarn". Llama 3's scaling is a tensor (`rope_freqs.weight`) of
            divisors, not a setting.
        factor: how many times the original context the scaled one is.
        original_context_length: context length before scaling (YaRN's correction range).
        magnitude: factor on cos and sin; 1 except with YaRN (llama.cpp: `rope_attn_factor` times
            YaRN's mscale).
        yarn_ext_factor, yarn_beta_fast, yarn_beta_slow: YaRN's ramp (Peng et al. 2023,
            section 3.2).
        no_rope_interval: every n-th layer (layers n-1, 2n-1, ...) is not rotated; 0 for none.
    """

    n_dims: int
    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    magnitude: float = 1.0
    yarn_ext_factor: float = 0.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    no_rope_interval: int = 0


@dataclass(frozen=True)
class MoeConfig:
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
class AttentionParams:
    """Parameters of one layer's attention besides softmax(q . k) v.

    Attributes:
        softmax_scale: the factor that turns q . k into a logit.
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
class ModelConfig:
    """Sizes and constants of one model.

    `n_layers`, `n_embd`, `n_heads`, `n_kv_heads`, `head_dim`, `n_ff`, `n_vocab` are counts;
    `n_ctx_train` is the context length in tokens the model was trained for; `rms_eps` is added to
    the mean square inside RMSNorm; attention logits are `q . k * softmax_scale`.

    `attention_temperature_scale` and `attention_temperature_length` lengthen q with its position
    (llama.cpp: `log(floor(pos / length) + 1) * scale + 1`); a scale of 0 turns that off.
    """

    architecture: str
    name: str
    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    rms_eps: float
    rope: RopeConfig
    softmax_scale: float
    moe: MoeConfig | None = None
    attention_temperature_scale: float = 0.0
    attention_temperature_length: int = 0


DEVICES = ("auto", "cuda", "cpu", "reference")
"""Values of `--device`; "auto" is "cuda" if that can be used, else "cpu"."""

FIT = ("on", "off")
"""Values of `--fit`: "on" refuses a model that does not fit in memory."""

KV_ROTATIONS = ("auto", "on", "off")
"""Values of `CacheConfig.kv_rotation`."""


@dataclass(frozen=True)
class KVScales:
    """How large K and V of a model get, by layer and KV head; `cache/scales.py` keeps it in a file.

    Attributes:
        architecture, name, n_layers, n_kv_heads, head_dim: the model's.
        rotation_k, rotation_v: channels that were rotated together, or 0 (see `SegmentSpec`).
        n_tokens: of the text that it was measured with.
        absmax_k, absmax_v: [n_layers][n_kv_heads], the largest magnitude in the rows as they are
            to be packed: K after RoPE, both after rotation.
    """

    architecture: str
    name: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    rotation_k: int
    rotation_v: int
    n_tokens: int
    absmax_k: tuple[tuple[float, ...], ...]
    absmax_v: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CacheConfig:
    """The types and sizes of a KV cache.

    Attributes:
        type_k, type_v: names in `localkv.formats.KV_FORMATS`, chosen separately.
        n_ctx: tokens that one sequence can hold.
        n_sequences: sequences that are held at the same time.
        kv_rotation: whether K and V are stored rotated (`kernels/hadamard.py`): "on", "off", or
            "auto", which rotates types that gain from it.
        kv_scales: for types that are scaled by head.

    Raises:
        UsageError: `kv_rotation` is none of these.
    """

    type_k: str = "f16"
    type_v: str = "f16"
    n_ctx: int = 4096
    n_sequences: int = 1
    kv_rotation: str = "auto"
    kv_scales: KVScales | None = None

    def __post_init__(self) -> None:
        if self.kv_rotation not in KV_ROTATIONS:
            raise UsageError(
                f"unknown kv_rotation {self.kv_rotation!r}", hint=f"use {', '.join(KV_ROTATIONS)}"
            )
