"""Models of a well-known shape, and the tensors that a file of one would list. No torch.

Enough for planning memory; `synthetic.py` makes models of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.arch.ffn_spec import Ffn, MlpSpec, MoeSpec
from localkv.arch.spec import LayerSpec, ModelSpec
from localkv.errors import UsageError
from localkv.formats import FORMATS
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.metadata import Metadata


def _keys(
    n_layers: int, n_embd: int, n_heads: int, n_kv_heads: int, n_ctx: int, eps: float, theta: float
) -> dict[str, object]:
    return {
        "block_count": n_layers,
        "embedding_length": n_embd,
        "context_length": n_ctx,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": theta,
    }


def _spec(
    architecture: str, name: str, n_vocab: int, n_embd: int, keys: dict[str, object]
) -> ModelSpec:
    """What the architecture's family makes of these keys, as of a file's."""
    metadata = Metadata({f"{architecture}.{key}": value for key, value in keys.items()}, name)
    shapes = {"token_embd.weight": (n_vocab, n_embd)}
    return ARCHS[architecture](Facts(architecture, name, metadata, shapes))


def _llama(
    name: str, n_layers: int, n_embd: int, n_heads: int, n_ff: int, n_vocab: int = 128256
) -> ModelSpec:
    """A Llama 3 model: 8 KV heads, 128k tokens of context."""
    keys = _keys(n_layers, n_embd, n_heads, 8, 1 << 17, 1e-5, 500000.0)
    return _spec("llama", name, n_vocab, n_embd, {**keys, "feed_forward_length": n_ff})


def _qwen3_moe(
    name: str,
    n_layers: int,
    n_embd: int,
    n_heads: int,
    experts: tuple[int, int, int],
    n_vocab: int = 151936,
) -> ModelSpec:
    """A Qwen3 model with routed experts (how many, used, width of one): 4 KV heads of 128."""
    names = ("expert_count", "expert_used_count", "expert_feed_forward_length")
    keys = {
        **_keys(n_layers, n_embd, n_heads, 4, 40960, 1e-6, 1e6),
        "attention.key_length": 128,
        **dict(zip(names, experts, strict=True)),
    }
    return _spec("qwen3moe", name, n_vocab, n_embd, keys)


SHAPES = {
    config.name: config
    for config in (
        _llama("llama-tiny", 2, 512, 16, 1024, 512),
        _llama("llama-1b", 16, 2048, 32, 8192),
        _llama("llama-3b", 28, 3072, 24, 8192),
        _llama("llama-8b", 32, 4096, 32, 14336),
        _llama("llama-70b", 80, 8192, 64, 28672),
        _qwen3_moe("moe-tiny", 2, 256, 8, (8, 2, 256), 512),
        _qwen3_moe("qwen3-30b-a3b", 48, 2048, 32, (128, 8, 768)),
    )
}
"""Llama 3's models and one of Qwen3's, and tiny ones that take no time."""


def shape_and_type(name: str) -> tuple[str, str]:
    """The shape and the type of weights that "SHAPE:TYPE" names, in lower case but for types' K.

    Raises:
        UsageError: there is no such shape, or it names no type (of weights: `check_shape`).
    """
    shape, colon, type_name = name.lower().partition(":")
    _check_name(shape)
    if not colon:
        raise UsageError(
            f"--synthetic {name} names no type of weights",
            hint=f"as in --synthetic {shape}:q4_0",
        )
    return shape, {known.lower(): known for known in FORMATS}.get(type_name, type_name)


def check_shape(name: str, type_name: str) -> None:
    """Refuse what no model can be made of.

    Raises:
        UsageError: there is no such shape, or no such type of weights.
    """
    _check_name(name)
    if type_name not in FORMATS or not FORMATS[type_name].is_weight:
        types = ", ".join(fmt.name for fmt in FORMATS.values() if fmt.is_weight)
        raise UsageError(f"unknown type of weights {type_name!r}", hint=f"types: {types}")


def _check_name(shape: str) -> None:
    if shape not in SHAPES:
        raise UsageError(f"unknown shape {shape!r}", hint=f"shapes: {', '.join(SHAPES)}")


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


def _tensor_shapes(config: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as `weights.model_weights` wants them."""
    n_embd = config.n_embd
    yield "token_embd.weight", (config.n_vocab, n_embd)
    yield "output.weight", (config.n_vocab, n_embd)
    yield f"{config.output_norm.tensor}.weight", (n_embd,)
    for i, layer in enumerate(config.layers):
        for name, shape in (*_attention_shapes(layer, n_embd), *_ffn_shapes(layer.ffn, n_embd)):
            yield f"blk.{i}.{name}.weight", shape


def _attention_shapes(layer: LayerSpec, n_embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    spec = layer.attention
    for norm in (layer.attn_norm, layer.ffn_norm, layer.post_attn_norm, layer.post_ffn_norm):
        if norm is not None:
            yield norm.tensor, (n_embd,)
    yield "attn_q", (spec.n_heads * spec.key_dim, n_embd)
    yield "attn_k", (spec.n_kv_heads * spec.key_dim, n_embd)
    yield "attn_v", (spec.n_kv_heads * spec.value_dim, n_embd)
    yield "attn_output", (n_embd, spec.n_heads * spec.value_dim)
    for norm in (spec.q_norm, spec.k_norm):
        if norm is not None:
            yield norm.tensor, (spec.key_dim,)


def _ffn_shapes(ffn: Ffn | None, n_embd: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(ffn, MlpSpec):
        yield "ffn_gate", (ffn.n_ff, n_embd)
        yield "ffn_up", (ffn.n_ff, n_embd)
        yield "ffn_down", (n_embd, ffn.n_ff)
        return
    assert isinstance(ffn, MoeSpec)
    yield "ffn_gate_inp", (ffn.n_experts, n_embd)
    yield "ffn_gate_exps", (ffn.n_experts, ffn.n_ff, n_embd)
    yield "ffn_up_exps", (ffn.n_experts, ffn.n_ff, n_embd)
    yield "ffn_down_exps", (ffn.n_experts, n_embd, ffn.n_ff)
