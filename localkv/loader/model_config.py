"""`ModelConfig` from a GGUF file's metadata: the keys that llama.cpp reads, and its defaults."""

from __future__ import annotations

import math

from localkv.arch import ARCHS, ArchSpec
from localkv.config import ModelConfig, MoeConfig, RopeConfig
from localkv.errors import ModelFileError
from localkv.loader.metadata import Metadata
from localkv.loader.model_header import ModelHeader

SOFTMAX_GATING = 1
"""llama.cpp's `LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX`."""


def arch_spec(gguf: ModelHeader) -> ArchSpec:
    """The architecture of a file.

    Raises:
        ModelFileError: the architecture is not supported; the message names it.
    """
    name = gguf.metadata.string("general.architecture")
    if name not in ARCHS:
        raise ModelFileError(
            f"architecture {name!r} is not supported", hint=f"supported: {', '.join(ARCHS)}"
        )
    return ARCHS[name]


def model_config(gguf: ModelHeader) -> ModelConfig:
    """Sizes and constants of the model in a file.

    Raises:
        ModelFileError: a key is missing, of the wrong type, or its value makes no sense.
    """
    if not gguf.tensors:
        raise ModelFileError(f"{gguf.path.name} holds no weights, only a vocabulary")
    spec = arch_spec(gguf)
    meta = gguf.metadata
    arch = meta.string("general.architecture")
    n_embd = meta.integer(f"{arch}.embedding_length")
    n_heads = _same_in_all_layers(meta, f"{arch}.attention.head_count")
    n_kv_heads = _same_in_all_layers(meta, f"{arch}.attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise ModelFileError(f"{n_heads} heads can't share {n_kv_heads} KV heads evenly")
    head_dim = meta.integer(f"{arch}.attention.key_length", max(1, n_embd // n_heads))
    value_dim = meta.integer(f"{arch}.attention.value_length", head_dim)
    if head_dim != value_dim:
        raise ModelFileError(f"heads of different size for K ({head_dim}) and V ({value_dim})")
    n_ctx_train = meta.integer(f"{arch}.context_length")
    if "token_embd.weight" not in gguf.tensors:
        raise ModelFileError("missing tensor 'token_embd.weight'")
    moe = _moe_config(meta, arch, spec)
    scale = 0.0
    if spec.attention_temperature:
        scale = meta.number(f"{arch}.attention.temperature_scale", default=0.0)
    rope = _rope_config(meta, arch, spec, head_dim, n_ctx_train)
    return ModelConfig(
        architecture=arch,
        name=meta.string("general.name", default=gguf.path.stem),
        n_layers=meta.integer(f"{arch}.block_count"),
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_ff=0 if moe else _same_in_all_layers(meta, f"{arch}.feed_forward_length"),
        n_vocab=gguf.tensors["token_embd.weight"].shape[0],
        n_ctx_train=n_ctx_train,
        rms_eps=meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope=rope,
        softmax_scale=1.0 / math.sqrt(head_dim),
        moe=moe,
        attention_temperature_scale=scale,
        attention_temperature_length=rope.original_context_length if scale else 0,
    )


def _same_in_all_layers(meta: Metadata, key: str, default: int | None = None) -> int:
    """A count that some files give as one number per layer."""
    value = meta.get(key)
    if not isinstance(value, list):
        return meta.integer(key) if default is None else meta.integer(key, default)
    counts = set(meta.integers(key))
    if len(counts) != 1:
        raise ModelFileError(f"key {key!r} differs between layers, which is not supported")
    return counts.pop()


def _rope_config(
    meta: Metadata, arch: str, spec: ArchSpec, head_dim: int, n_ctx_train: int
) -> RopeConfig:
    prefix = f"{arch}.rope"
    n_dims = meta.integer(f"{prefix}.dimension_count", head_dim)
    if n_dims > head_dim or n_dims % 2:
        raise ModelFileError(f"RoPE can't rotate {n_dims} channels of a head of {head_dim}")
    scaling = meta.string(f"{prefix}.scaling.type", default="linear")
    if scaling not in ("none", "linear", "yarn"):
        raise ModelFileError(
            f"RoPE scaling {scaling!r} is not supported", hint="supported: none, linear, yarn"
        )
    # files from 2023 give the linear factor under an older key; 0 stands for none
    old_factor = meta.number(f"{prefix}.scale_linear", default=0.0)
    factor = (
        1.0 if scaling == "none" else meta.number(f"{prefix}.scaling.factor", old_factor) or 1.0
    )
    theta = meta.number(f"{prefix}.freq_base", 10000.0)
    original = meta.integer(f"{prefix}.scaling.original_context_length", n_ctx_train)
    ext = meta.number(f"{prefix}.scaling.yarn_ext_factor", default=-1.0)
    if ext < 0:  # llama.cpp's way to say that the type of scaling decides
        ext = float(scaling == "yarn")
    return RopeConfig(
        n_dims=n_dims,
        theta=theta,
        scaling="none" if scaling == "linear" and factor == 1.0 else scaling,
        factor=factor,
        original_context_length=original,
        magnitude=_rope_magnitude(meta, prefix, factor, ext),
        yarn_ext_factor=ext,
        yarn_beta_fast=meta.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        yarn_beta_slow=meta.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
        no_rope_interval=spec.no_rope_interval,
    )


def _rope_magnitude(meta: Metadata, prefix: str, factor: float, ext_factor: float) -> float:
    """Factor on cos and sin: what llama.cpp's context and `ggml_rope_yarn` come to together."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    attn_factor = meta.number(f"{prefix}.scaling.attn_factor", default=1.0)
    if ext_factor == 0.0:
        return attn_factor * meta.number(f"{prefix}.scaling.yarn_attn_factor", default=1.0)
    all_dims = meta.number(f"{prefix}.scaling.yarn_log_multiplier", default=0.0)
    below = mscale(all_dims) if all_dims else 1.0
    if below <= 0:
        raise ModelFileError(f"key '{prefix}.scaling.yarn_log_multiplier' is {all_dims}")
    return attn_factor * mscale(1.0) / below


def _moe_config(meta: Metadata, arch: str, spec: ArchSpec) -> MoeConfig | None:
    n_experts = meta.integer(f"{arch}.expert_count", default=0)
    if spec.moe == "no" or (spec.moe == "optional" and n_experts == 0):
        if n_experts:
            raise ModelFileError(f"architecture {arch!r} with experts is not supported")
        return None
    n_experts = meta.integer(f"{arch}.expert_count")
    n_used = meta.integer(f"{arch}.expert_used_count")
    if n_used > n_experts:
        raise ModelFileError(f"{n_used} of {n_experts} experts can't be used")
    gating = meta.integer(f"{arch}.expert_gating_func", default=SOFTMAX_GATING)
    if gating not in (0, SOFTMAX_GATING):
        raise ModelFileError(f"expert gating function {gating} is not supported, only softmax")
    n_ff = meta.integer(f"{arch}.expert_feed_forward_length", default=0)
    n_ff = n_ff or _same_in_all_layers(meta, f"{arch}.feed_forward_length")
    n_ff_shared = 0
    if spec.moe_shared_expert:
        default = _same_in_all_layers(meta, f"{arch}.feed_forward_length", n_ff)
        n_ff_shared = meta.integer(f"{arch}.expert_shared_feed_forward_length", default)
    return MoeConfig(
        n_experts=n_experts,
        n_experts_used=n_used,
        n_ff=n_ff,
        n_ff_shared=n_ff_shared,
        renormalise=spec.moe_renormalise,
    )
