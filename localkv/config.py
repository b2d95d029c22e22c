"""Facts about a model, a cache and a request, as frozen dataclasses.

Nothing here computes, and nothing here imports torch: these are the values that the loader fills
in, that the user chooses, and that every layer above passes down unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

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
"""What `--device` takes; "auto" is "cuda" where that can be used, else "cpu"."""

FIT = ("on", "off")
"""What `--fit` takes: "on" refuses what does not fit in memory."""

KV_ROTATIONS = ("auto", "on", "off")
"""What `CacheConfig.kv_rotation` takes."""


@dataclass(frozen=True)
class KVScales:
    """How large K and V of a model get, by layer and KV head; `kv_scales.py` keeps it in a file.

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
    """What the KV cache is made of.

    Attributes:
        type_k, type_v: names in `localkv.quant_formats.KV_FORMATS`, chosen apart.
        n_ctx: tokens that one sequence can hold.
        n_sequences: sequences that are held at the same time.
        kv_rotation: whether K and V are stored rotated (`kernels/hadamard.py`): "on", "off", or
            "auto", which rotates what gains by it.
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


SAMPLER_ORDER = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typ_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)
"""llama.cpp's default sampler chain (`common_params_sampling::samplers`)."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Names, order and defaults are llama.cpp's (`common/common.h`).

    Attributes:
        seed: of the random generator; None or -1 draws one, which `Completion` reports.
        temperature: <= 0 is greedy: the token with the largest logit after the other samplers.
        dynatemp_range, dynatemp_exponent: entropy-dependent temperature in
            [temperature - range, temperature + range]; a range <= 0 turns it off.
        top_k: keep the k most likely; <= 0 keeps all.
        top_p, min_p, typ_p: nucleus, minimum relative probability, locally typical; 1, 0 and 1
            turn them off.
        top_n_sigma: keep logits within n standard deviations of the largest; <= 0 turns it off.
        xtc_probability, xtc_threshold: exclude top choices; a probability of 0 or a threshold above
            0.5 turns it off.
        min_keep: tokens that top_p, typ_p, min_p and xtc leave at least.
        repeat_last_n: tokens the penalties look back on; 0 none, -1 the whole context.
        repeat_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 turn them off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers:
            the DRY repetition penalty; multiplier 0 turns it off, and so does a last_n of 0; a
            last_n of -1 is the whole context.
        logit_bias: token id -> added to its logit, before all samplers; -inf bans the token.
        samplers: the chain, in this order; a sampler left out does not run.

    Raises:
        UsageError: a value out of its range, or not a number.
    """

    seed: int | None = None
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: tuple[str, ...] = SAMPLER_ORDER

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and not isinstance(value, Integral):
                raise UsageError(f"{f.name} must be a whole number, not {value!r}")
            if f.type == "float" and not isinstance(value, Real):
                raise UsageError(f"{f.name} must be a number, not {value!r}")

        def check(accepts: Callable[[float], bool], wanted: str, *names: str) -> None:
            for name in names:
                if not accepts(value := getattr(self, name)):
                    raise UsageError(f"{name} must be {wanted}, not {value}")

        probabilities = ("top_p", "min_p", "typ_p", "xtc_probability", "xtc_threshold")
        scales = ("temperature", "dynatemp_range", "top_n_sigma", "dry_multiplier")
        check(lambda x: 0 <= x <= 1, "between 0 and 1", *probabilities)
        check(math.isfinite, "a finite number", *scales, "frequency_penalty", "presence_penalty")
        check(lambda x: 0 < x < math.inf, "more than 0", "repeat_penalty")
        check(lambda x: 1 <= x < math.inf, "1 or more", "dry_base")
        check(lambda x: 0 <= x < math.inf, "0 or more", "dynatemp_exponent")
        check(lambda x: x >= 0, "0 or more", "dry_allowed_length", "min_keep")
        check(lambda x: x >= -1, "-1 or more", "repeat_last_n", "dry_penalty_last_n")
        if self.seed is not None and not (isinstance(self.seed, Integral) and self.seed >= -1):
            raise UsageError(f"seed must be a whole number of 0 or more, not {self.seed!r}")
        for token, bias in self.logit_bias.items():
            if not (isinstance(token, Integral) and token >= 0):
                raise UsageError(f"logit_bias has {token!r} where a token id should be")
            if not (isinstance(bias, Real) and bias < math.inf):
                raise UsageError(f"logit_bias of token {token} must be a number, not {bias}")
        if isinstance(self.dry_sequence_breakers, str):
            raise UsageError("dry_sequence_breakers must be a tuple of strings, not one string")
        unknown = [name for name in self.samplers if name not in SAMPLER_ORDER]
        if unknown:
            raise UsageError(
                f"unknown sampler {unknown[0]!r}", hint=f"samplers: {', '.join(SAMPLER_ORDER)}"
            )
