"""Models of a well-known shape, and the tensors that a file of one would list. No torch.

Enough for planning memory; `synthetic.py` makes models of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from localkv.arch import ARCHS
from localkv.config import ModelConfig, MoeConfig, RopeConfig
from localkv.errors import UsageError
from localkv.formats import FORMATS
from localkv.loader.gguf_header import TensorInfo


def _llama(
    name: str, n_layers: int, n_embd: int, n_heads: int, n_ff: int, n_vocab: int = 128256
) -> ModelConfig:
    """A Llama 3 model: 8 KV heads, 128k tokens of context."""
    head_dim = n_embd // n_heads
    return ModelConfig(
        architecture="llama",
        name=name,
        n_layers=n_layers,
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=head_dim,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx_train=1 << 17,
        rms_eps=1e-5,
        rope=RopeConfig(n_dims=head_dim, theta=500000.0),
        softmax_scale=1.0 / math.sqrt(head_dim),
    )


def _qwen3_moe(
    name: str, n_layers: int, n_embd: int, n_heads: int, moe: MoeConfig, n_vocab: int = 151936
) -> ModelConfig:
    """A Qwen3 model with routed experts: 4 KV heads of 128."""
    return ModelConfig(
        architecture="qwen3moe",
        name=name,
        n_layers=n_layers,
        n_embd=n_embd,
        n_heads=n_heads,
        n_kv_heads=4,
        head_dim=128,
        n_ff=0,
        n_vocab=n_vocab,
        n_ctx_train=40960,
        rms_eps=1e-6,
        rope=RopeConfig(n_dims=128, theta=1e6),
        softmax_scale=1.0 / math.sqrt(128),
        moe=moe,
    )


SHAPES = {
    config.name: config
    for config in (
        _llama("llama-tiny", 2, 512, 16, 1024, 512),
        _llama("llama-1b", 16, 2048, 32, 8192),
        _llama("llama-3b", 28, 3072, 24, 8192),
        _llama("llama-8b", 32, 4096, 32, 14336),
        _llama("llama-70b", 80, 8192, 64, 28672),
        _qwen3_moe("moe-tiny", 2, 256, 8, MoeConfig(8, 2, 256), 512),
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, MoeConfig(128, 8, 768)),
    )
}
"""Sizes of Llama 3's models and of one of Qwen3's, and of tiny ones that take no time."""


def shape_and_type(name: str) -> tuple[str, str]:
    """The shape and the type of weights that "SHAPE:TYPE" names, in lower case but for types' K.

    Raises:
        UsageError: it names no type. What it names may not exist (`check_shape`).
    """
    shape, colon, type_name = name.lower().partition(":")
    if not colon:
        raise UsageError(
            f"--synthetic {name} names no type of weights",
            hint=f"as in --synthetic {shape or 'llama-1b'}:q4_0",
        )
    return shape, {known.lower(): known for known in FORMATS}.get(type_name, type_name)


def check_shape(name: str, type_name: str) -> None:
    """Refuse what no model can be made of.

    Raises:
        UsageError: there is no such shape, or no such type of weights.
    """
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}", hint=f"shapes: {', '.join(SHAPES)}")
    if type_name not in FORMATS or not FORMATS[type_name].is_weight:
        types = ", ".join(fmt.name for fmt in FORMATS.values() if fmt.is_weight)
        raise UsageError(f"unknown type of weights {type_name!r}", hint=f"types: {types}")


def output_type(type_name: str) -> str:
    """The output matrix' type: Q6_K where the others have fewer bits, as in llama-quantize."""
    few = FORMATS[type_name].row_bytes(256) < FORMATS["q6_K"].row_bytes(256)
    return "q6_K" if few else type_name


def shape_tensors(name: str, type_name: str) -> tuple[TensorInfo, ...]:
    """The tensors of a model of a shape, with matrices of one type; offsets are not known.

    Raises:
        UsageError: as `check_shape`.
    """
    check_shape(name, type_name)
    tensors = []
    for tensor, shape in _tensor_shapes(SHAPES[name]):
        if len(shape) == 1:
            fmt = FORMATS["f32"]
        else:
            fmt = FORMATS[output_type(type_name) if tensor == "output.weight" else type_name]
        n_bytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
        tensors.append(TensorInfo(tensor, shape, fmt, n_bytes, offset=0, part=0))
    return tuple(tensors)


def _tensor_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as `weights.model_weights` wants them."""
    n_embd, head_dim = config.n_embd, config.head_dim
    n_q, n_kv = config.n_heads * head_dim, config.n_kv_heads * head_dim
    yield "token_embd.weight", (config.n_vocab, n_embd)
    yield "output.weight", (config.n_vocab, n_embd)
    yield "output_norm.weight", (n_embd,)
    for layer in range(config.n_layers):
        at = f"blk.{layer}"
        yield f"{at}.attn_norm.weight", (n_embd,)
        yield f"{at}.attn_q.weight", (n_q, n_embd)
        yield f"{at}.attn_k.weight", (n_kv, n_embd)
        yield f"{at}.attn_v.weight", (n_kv, n_embd)
        yield f"{at}.attn_output.weight", (n_embd, n_q)
        if ARCHS[config.architecture].qk_norm:
            yield f"{at}.attn_q_norm.weight", (head_dim,)
            yield f"{at}.attn_k_norm.weight", (head_dim,)
        yield f"{at}.ffn_norm.weight", (n_embd,)
        if config.moe is None:
            yield f"{at}.ffn_gate.weight", (config.n_ff, n_embd)
            yield f"{at}.ffn_up.weight", (config.n_ff, n_embd)
            yield f"{at}.ffn_down.weight", (n_embd, config.n_ff)
        else:
            n_experts, n_ff = config.moe.n_experts, config.moe.n_ff
            yield f"{at}.ffn_gate_inp.weight", (n_experts, n_embd)
            yield f"{at}.ffn_gate_exps.weight", (n_experts, n_ff, n_embd)
            yield f"{at}.ffn_up_exps.weight", (n_experts, n_ff, n_embd)
            yield f"{at}.ffn_down_exps.weight", (n_experts, n_embd, n_ff)
