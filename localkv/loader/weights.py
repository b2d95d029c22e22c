"""Named tensors -> `ModelWeights`, by the model's specification.

The order follows a model: all of it, a layer, the mixers (attention, attention over latents,
recurrent ones), feed-forward blocks, and what a layer does to the residual stream beyond these.
Reading without data lists the tensors that a file has to have (`check_tensors`); `lock_weights`
keeps the weights in memory (`--mlock`).
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import (
    PER_LAYER_ROWS,
    AltUpSpec,
    AttentionSpec,
    DeltaNetSpec,
    Ffn,
    LatentAttentionSpec,
    LaurelSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    MlpAndMoeSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PerLayerInputSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from localkv.cache.arrays import Array, Arrays
from localkv.errors import ModelFileError, byte_size, quoted
from localkv.kernels.backend import Backend, as_in_file
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.device_memory import DeviceMemory
from localkv.kernels.layer_kinds import check_layers
from localkv.kernels.layer_weights import (
    AltUpProjections,
    AltUpWeights,
    AttentionWeights,
    DeltaNetWeights,
    FfnWeights,
    LatentAttentionWeights,
    LaurelWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    MixerWeights,
    MlpAndMoeWeights,
    MlpWeights,
    MoeWeights,
    Norm,
    PerLayerInputWeights,
    PerLayerTable,
    RecurrentWeights,
    ShortConvWeights,
    tensors_of,
)
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.model_header import ModelHeader, model_spec
from localkv.loader.smoothing import SmoothedTensors, Smoothing
from localkv.loader.tensor_reader import FileTensors, TensorReader, TensorSource, check_tensor
from localkv.model import ModelWeights, Transformer
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import Plane
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.machine_memory import Range, lock, unlock


def load_model(
    path: str | os.PathLike[str] | GGUFFile,
    backend: Backend,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    smoothing: Smoothing | None = None,
    late: bool = False,
) -> tuple[Transformer, list[str]]:
    """The model in a GGUF file, on a backend.

    Args:
        path: the file.
        backend: prepares the weights as it wants them.
        on_layer: called with the layers that are loaded, of how many.
        smoothing: of K and V, folded into the weights.
        late: weights may be laid out while the model is in use (`Backend.late`), where they are
            views of the file.

    Returns:
        the model, and the names of tensors that it does not know.

    Raises:
        ModelFileError: the file is malformed, its architecture, a type or on this backend a layer
            is not supported, or a tensor is missing or of the wrong shape.
    """
    gguf = path if isinstance(path, GGUFFile) else open_gguf(path)
    config = model_spec(gguf)
    check_layers(backend, config)
    source: TensorSource = FileTensors(gguf)
    if smoothing is not None:
        source = SmoothedTensors(source, smoothing.tensor_factors(config, gguf.tensors))
    read = TensorReader(
        source,
        backend,
        halve_activations=config.has_experts,
        late=backend.late if late and smoothing is None else None,
    )
    weights = model_weights(read, config, on_layer)
    unused = [name for name in gguf.tensors if name not in read.taken and not config.ignores(name)]
    return Transformer(config, weights, backend), unused


def model_weights(
    read: TensorReader,
    config: ModelSpec,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> ModelWeights:
    """All tensors that a model has.

    Args:
        on_layer: called with the layers that are read, of how many.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    n_vocab, n_embd = config.n_vocab, config.n_embd
    token_embd = read.embedding("token_embd.weight", n_vocab, n_embd)
    if read.has("output.weight"):
        output = read.linear("output", n_vocab, n_embd)
    elif not token_embd.reads_rows:
        output = Linear(token_embd)
    else:
        output = Linear(read.late_matrix("token_embd.weight", n_vocab, n_embd))
    divisors = {
        name: read.values(name, rope.n_dims // 2)
        for rope in config.ropes
        for name in (rope.divisors, rope.long_divisors)
        if name
    }
    layers = []
    for i, spec in enumerate(config.layers):
        on_layer(i, config.n_layers)
        layers.append(layer_weights(read, spec, config.altup, n_embd, f"blk.{i}."))
    on_layer(config.n_layers, config.n_layers)
    return ModelWeights(
        token_embd=token_embd,
        layers=tuple(layers),
        output_norm=read.norm(config.output_norm, n_embd),
        output=output,
        rope_divisors=divisors,
        per_layer=per_layer_table(read, config),
        altup=altup_projections(read, config),
    )


def layer_weights(
    read: TensorReader, spec: LayerSpec, altup: AltUpSpec | None, n_embd: int, at: str
) -> LayerWeights:
    """The weights of the layer whose tensors' names begin with `at`."""
    per_layer, laurel = spec.per_layer_input, spec.laurel

    def norm(of: NormSpec | None) -> Norm | None:
        return None if of is None else read.norm(of, n_embd, at)

    scale = 1.0
    if spec.output_scale is not None:
        scale = float(read.values(f"{at}{spec.output_scale}.weight", 1)[0])
    return LayerWeights(
        mixer=None if spec.mixer is None else mixer_weights(read, spec.mixer, n_embd, at),
        ffn=None if spec.ffn is None else ffn_weights(read, spec.ffn, n_embd, at),
        attn_norm=norm(spec.attn_norm),
        ffn_norm=norm(spec.ffn_norm),
        post_attn_norm=norm(spec.post_attn_norm),
        post_ffn_norm=norm(spec.post_ffn_norm),
        output_scale=scale,
        per_layer_input=per_layer_input_weights(read, per_layer, n_embd, at) if per_layer else None,
        laurel=laurel_weights(read, laurel, n_embd, at) if laurel else None,
        altup=altup_weights(read, altup, n_embd, at) if altup else None,
        beside=None if spec.beside is None else mixer_weights(read, spec.beside, n_embd, at),
    )


def mixer_weights(read: TensorReader, spec: Mixer, n_embd: int, at: str) -> MixerWeights:
    """The mixer of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    match spec:
        case AttentionSpec():
            return _attention(read, spec, n_embd, at)
        case LatentAttentionSpec():
            return latent_weights(read, spec, n_embd, at)
        case DeltaNetSpec() | ShortConvSpec() | Mamba2Spec():
            return recurrent_weights(read, spec, n_embd, at)


def _attention(read: TensorReader, spec: AttentionSpec, n_embd: int, at: str) -> AttentionWeights:
    attn_q, attn_k, attn_v = _qkv(read, spec, n_embd, at)
    q_norm, k_norm, v_norm, sinks = spec.q_norm, spec.k_norm, spec.v_norm, spec.sinks
    n_kv_heads, stores = spec.n_kv_heads, spec.kv_from is None
    return AttentionWeights(
        attn_q=attn_q,
        attn_k=attn_k,
        attn_v=attn_v,
        output=read.linear(f"{at}attn_output", n_embd, spec.width),
        attn_q_norm=read.head_norm(q_norm, spec.n_heads, spec.key_dim, at) if q_norm else None,
        attn_k_norm=read.head_norm(k_norm, n_kv_heads, spec.key_dim, at)
        if k_norm and stores
        else None,
        v_norm=read.head_norm(v_norm, n_kv_heads, spec.value_dim, at)
        if v_norm and stores
        else None,
        sinks=None if sinks is None else read.vector(f"{at}{sinks}.weight", spec.n_heads),
    )


def _qkv(
    read: TensorReader, spec: AttentionSpec, n_embd: int, at: str
) -> tuple[Linear, Linear | None, Linear | None]:
    """Projections of q, K and V, from one tensor or from several."""
    n_q = spec.n_heads * spec.key_dim * (2 if spec.gated else 1)
    n_k, n_v = spec.n_kv_heads * spec.key_dim, spec.n_kv_heads * spec.value_dim
    bias = spec.qkv_bias
    if spec.kv_from is None and read.has(f"{at}attn_qkv.weight"):
        apart = read.has(f"{at}attn_q.bias")
        attn_q, attn_k, attn_v = read.fused_linear(
            f"{at}attn_qkv", (n_q, n_k, n_v), n_embd, bias_required=bias and not apart
        )
        if not apart:
            return attn_q, attn_k, attn_v
        return (
            replace(attn_q, bias=read.vector(f"{at}attn_q.bias", n_q)),
            replace(attn_k, bias=read.vector(f"{at}attn_k.bias", n_k)),
            replace(attn_v, bias=read.vector(f"{at}attn_v.bias", n_v)),
        )

    def linear(name: str, n_out: int) -> Linear:
        return read.linear(f"{at}{name}", n_out, n_embd, bias_required=bias)

    stores = spec.kv_from is None
    return (
        _gated_q(read, spec, n_embd, at) if spec.gated else linear("attn_q", n_q),
        linear("attn_k", n_k) if stores else None,
        linear("attn_v", n_v) if stores and not spec.value_from_key else None,
    )


def _gated_q(read: TensorReader, spec: AttentionSpec, n_embd: int, at: str) -> Linear:
    """Each head's q, then its gate, which a file may have as a tensor of its own."""
    if not read.has(f"{at}attn_gate.weight"):
        n_q = 2 * spec.n_heads * spec.key_dim
        return read.linear(f"{at}attn_q", n_q, n_embd, bias_required=spec.qkv_bias)
    names = (f"{at}attn_q", f"{at}attn_gate")
    return read.interleaved(names, spec.n_heads, spec.key_dim, n_embd)


FLOATS = ("f32", "f16", "bf16")
"""Types that are transposed as they are."""


def latent_weights(
    read: TensorReader, spec: LatentAttentionSpec, n_embd: int, at: str
) -> LatentAttentionWeights:
    """Attention over latents of the layer whose tensors' names begin with `at`.

    Older files hold `attn_kv_b`, [n_heads * (nope + value), latent], which makes each head's key
    and value of a latent. Its parts are what newer files hold as two tensors: `attn_v_b` as it is,
    and `attn_k_b` transposed. Float types are transposed as they are; the values of others are
    rounded to F16 for it, an error of at most 2^-11 of each, below the type's own.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    n_q = spec.n_heads * (spec.nope_dim + spec.rope_dim)
    rank, latent = spec.q_lora_rank, spec.latent_dim
    attn_q_a = None
    q_norm = spec.q_latent_norm
    if rank:
        attn_q_a = read.linear(f"{at}attn_q_a", rank, n_embd)
        attn_q = read.linear(f"{at}attn_q_b", n_q, rank)
    else:
        attn_q = read.linear(f"{at}attn_q", n_q, n_embd)
    k_b, v_b = _key_and_value(read, spec, at)
    return LatentAttentionWeights(
        attn_q=attn_q,
        attn_q_a=attn_q_a,
        attn_q_a_norm=read.norm(q_norm, rank, at) if q_norm else None,
        attn_kv_a_mqa=read.linear(f"{at}attn_kv_a_mqa", latent + spec.rope_dim, n_embd),
        attn_kv_a_norm=read.norm(spec.latent_norm, latent, at),
        attn_k_b=k_b,
        attn_v_b=v_b,
        output=read.linear(f"{at}attn_output", n_embd, spec.width),
    )


def _key_and_value(
    read: TensorReader, spec: LatentAttentionSpec, at: str
) -> tuple[PackedTensor, PackedTensor]:
    """What makes latents of queries, and values of latents."""
    n_heads, nope, latent, value = spec.n_heads, spec.nope_dim, spec.latent_dim, spec.value_dim
    old = f"{at}attn_kv_b.weight"
    if not read.has(old):
        return (
            read.matrix(f"{at}attn_k_b.weight", n_heads, latent, nope),
            read.matrix(f"{at}attn_v_b.weight", n_heads, value, latent),
        )
    both = read.packed(old, n_heads * (nope + value), latent)
    rows = np.asarray(both.rows).reshape(n_heads, nope + value, -1)
    values = np.ascontiguousarray(rows[:, nope:])
    return (
        read.derived(
            old, transposed(replace(both, rows=rows[:, :nope], shape=(n_heads, nope, latent)))
        ),
        read.derived(old, replace(both, rows=values, shape=(n_heads, value, latent))),
    )


def transposed(stack: PackedTensor) -> PackedTensor:
    """A stack of matrices [n, rows, columns] as [n, columns, rows]: F16, or its own type of
    floats."""
    n, n_rows, n_columns = stack.shape
    shape = (n, n_columns, n_rows)
    if stack.format.name in FLOATS:
        size = stack.format.block_bytes
        items = stack.rows.reshape(n, n_rows, n_columns, size).transpose(0, 2, 1, 3)
        return replace(
            stack, rows=np.ascontiguousarray(items).reshape(n, n_columns, -1), shape=shape
        )
    values = np.ascontiguousarray(stack.decode().transpose(0, 2, 1)).astype(np.float16)
    return PackedTensor(FORMATS["f16"], values.view(np.uint8), shape)


def recurrent_weights(
    read: TensorReader, spec: RecurrentSpec, n_embd: int, at: str
) -> RecurrentWeights:
    """The recurrent mixer of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    match spec:
        case DeltaNetSpec():
            return _delta_net(read, spec, n_embd, at)
        case ShortConvSpec():
            return _short_conv(read, spec, n_embd, at)
        case Mamba2Spec():
            return _mamba2(read, spec, n_embd, at)


def _delta_net(read: TensorReader, spec: DeltaNetSpec, n_embd: int, at: str) -> DeltaNetWeights:
    attn_qkv, attn_gate = _qkvz(read, spec, n_embd, at)
    ssm_beta, ssm_alpha = _beta_alpha(read, spec, n_embd, at)
    n_heads = spec.n_value_heads
    return DeltaNetWeights(
        attn_qkv=attn_qkv,
        attn_gate=attn_gate,
        ssm_beta=ssm_beta,
        ssm_alpha=ssm_alpha,
        ssm_conv1d=_table(read, f"{at}ssm_conv1d.weight", spec.conv_channels, spec.conv_kernel),
        ssm_dt=read.vector(f"{at}ssm_dt.bias", n_heads),
        ssm_a=read.vector(f"{at}ssm_a", n_heads),
        ssm_norm=read.norm(spec.norm, spec.head_dim, at),
        output=read.linear(f"{at}ssm_out", n_embd, spec.width),
    )


def _qkvz(read: TensorReader, spec: DeltaNetSpec, n_embd: int, at: str) -> tuple[Linear, Linear]:
    """q, k, v and z; in files of the first converter one tensor, by key head."""
    if not read.has(f"{at}ssm_in.weight"):
        return (
            read.linear(f"{at}attn_qkv", spec.conv_channels, n_embd),
            read.linear(f"{at}attn_gate", spec.width, n_embd),
        )
    keys, values = spec.head_dim, spec.width // spec.n_key_heads
    parts = ((keys, keys, values), (values,))
    attn_qkv, attn_gate = read.rows_of(f"{at}ssm_in", spec.n_key_heads, parts, n_embd)
    return attn_qkv, attn_gate


def _beta_alpha(
    read: TensorReader, spec: DeltaNetSpec, n_embd: int, at: str
) -> tuple[Linear, Linear]:
    """What makes beta and alpha; in Qwen3-Next's files one tensor, by key head."""
    n_heads = spec.n_value_heads
    if not read.has(f"{at}ssm_ba.weight"):
        return (
            read.linear(f"{at}ssm_beta", n_heads, n_embd),
            read.linear(f"{at}ssm_alpha", n_heads, n_embd),
        )
    n_shared = n_heads // spec.n_key_heads
    parts = ((n_shared,), (n_shared,))
    beta, alpha = read.rows_of(f"{at}ssm_ba", spec.n_key_heads, parts, n_embd)
    return beta, alpha


def _short_conv(read: TensorReader, spec: ShortConvSpec, n_embd: int, at: str) -> ShortConvWeights:
    return ShortConvWeights(
        in_proj=read.linear(f"{at}shortconv.in_proj", 3 * spec.width, n_embd),
        conv=_table(read, f"{at}shortconv.conv.weight", spec.width, spec.kernel),
        output=read.linear(f"{at}shortconv.out_proj", n_embd, spec.width),
    )


def _mamba2(read: TensorReader, spec: Mamba2Spec, n_embd: int, at: str) -> Mamba2Weights:
    channels, n_heads = spec.conv_channels, spec.n_heads
    bias = f"{at}ssm_conv1d.bias"
    norm: Norm | None = None
    if spec.norm is not None:
        values = read.packed(f"{at}{spec.norm.tensor}.weight", *_groups(read, spec, at)).decode()
        norm = Norm(spec.norm, _floating(read, values.reshape(-1)))
    return Mamba2Weights(
        ssm_in=read.linear(f"{at}ssm_in", spec.width + channels + n_heads, n_embd),
        ssm_conv1d=_table(read, f"{at}ssm_conv1d.weight", channels, spec.conv_kernel),
        ssm_conv1d_bias=read.vector(bias, channels) if read.has(bias) else None,
        ssm_dt=read.vector(f"{at}ssm_dt.bias", n_heads),
        ssm_a=_column(read, f"{at}ssm_a", n_heads),
        ssm_d=_column(read, f"{at}ssm_d", n_heads),
        ssm_norm=norm,
        output=read.linear(f"{at}ssm_out", n_embd, spec.width),
    )


def _groups(read: TensorReader, spec: Mamba2Spec, at: str) -> tuple[int, ...]:
    return spec.n_groups, spec.width // spec.n_groups


def _column(read: TensorReader, name: str, size: int) -> Array:
    """A vector that files hold as [size, 1]."""
    return _floating(read, read.packed(name, size, 1).decode().reshape(-1))


def _table(read: TensorReader, name: str, n_rows: int, n: int) -> Array:
    """A small matrix of float32 that no product reads."""
    return _floating(read, read.packed(name, n_rows, n).decode())


def _floating(read: TensorReader, values: NDArray[np.float32]) -> Array:
    arrays = read.backend.arrays
    return arrays.floating(arrays.from_numpy(np.ascontiguousarray(values)))


def ffn_weights(read: TensorReader, spec: Ffn, n_embd: int, at: str) -> FfnWeights:
    """The feed-forward block of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    match spec:
        case MlpSpec():
            return _mlp(read, spec, n_embd, at)
        case MoeSpec():
            return _moe(read, spec, n_embd, at)
        case MlpAndMoeSpec():
            return MlpAndMoeWeights(
                mlp=_mlp(read, spec.mlp, n_embd, at),
                moe=_moe(read, spec.moe, n_embd, at),
                post_mlp_norm=read.norm(spec.post_mlp_norm, n_embd, at),
                post_moe_norm=read.norm(spec.post_moe_norm, n_embd, at),
                moe_norm=read.norm(spec.moe_norm, n_embd, at),
            )


def _mlp(read: TensorReader, spec: MlpSpec, n_embd: int, at: str, suffix: str = "") -> MlpWeights:
    gate_name, up_name = f"{at}ffn_gate{suffix}", f"{at}ffn_up{suffix}"
    gate: Linear | None = None
    if not spec.gated:
        up = read.linear(up_name, spec.n_ff, n_embd)
    elif read.has(f"{gate_name}.weight"):
        gate = read.linear(gate_name, spec.n_ff, n_embd)
        up = read.linear(up_name, spec.n_ff, n_embd)
    else:  # one tensor, the gate's rows first
        gate, up = read.fused_linear(up_name, (spec.n_ff, spec.n_ff), n_embd)
    return MlpWeights(gate, up, read.linear(f"{at}ffn_down{suffix}", n_embd, spec.n_ff))


def _moe(read: TensorReader, moe: MoeSpec, n_embd: int, at: str) -> MoeWeights:
    n_experts, n_ff = moe.n_experts, moe.n_ff

    def stack(name: str, n_out: int, n_in: int) -> PackedTensor:
        return read.late_matrix(f"{at}ffn_{name}_exps.weight", n_experts, n_out, n_in)

    def bias(name: str, n_out: int) -> Array | None:
        tensor = f"{at}ffn_{name}_exps.bias"
        return read.vector(tensor, n_experts, n_out) if moe.biased or read.has(tensor) else None

    def optional(tensor: str, n: int) -> Array | None:
        return read.vector(f"{at}{tensor}", n) if read.has(f"{at}{tensor}") else None

    experts: dict[str, Any]
    if moe.gated and read.has(f"{at}ffn_gate_up_exps.weight"):
        experts = {
            "ffn_gate_exps": None,
            "ffn_up_exps": None,
            "ffn_gate_up_exps": stack("gate_up", 2 * n_ff, n_embd),
            "gate_up_bias": bias("gate_up", 2 * n_ff),
        }
    else:
        experts = {
            "ffn_gate_exps": stack("gate", n_ff, n_embd) if moe.gated else None,
            "ffn_up_exps": stack("up", n_ff, n_embd),
            "gate_bias": bias("gate", n_ff) if moe.gated else None,
            "up_bias": bias("up", n_ff),
        }
    return MoeWeights(
        ffn_gate_inp=read.linear(f"{at}ffn_gate_inp", n_experts, n_embd, bias_required=moe.biased),
        **experts,
        ffn_down_exps=stack("down", n_embd, n_ff),
        down_bias=bias("down", n_embd),
        down_scale=optional("ffn_down_exps.scale", n_experts),
        exp_probs_b=read.vector(_selection_bias(read, at), n_experts)
        if moe.selection_bias
        else None,
        shared=_mlp(read, moe.shared, n_embd, at, "_shexp") if moe.n_ff_shared else None,
        ffn_gate_inp_shexp=read.vector(f"{at}ffn_gate_inp_shexp.weight", n_embd)
        if moe.shared_gated
        else None,
        router_norm=_router_norm(read, moe.router_norm, n_embd, at),
    )


def _router_norm(read: TensorReader, spec: NormSpec | None, n_embd: int, at: str) -> Norm | None:
    if spec is None:
        return None
    scale = read.values(f"{at}{spec.tensor}.scale", n_embd) / np.float32(math.sqrt(n_embd))
    arrays = read.backend.arrays
    return Norm(spec, arrays.floating(arrays.from_numpy(scale)))


def _selection_bias(read: TensorReader, at: str) -> str:
    """The tensor's name, which in a few files has no suffix."""
    bare = f"{at}exp_probs_b"
    return bare if read.has(bare) else f"{bare}.bias"


def per_layer_table(read: TensorReader, config: ModelSpec) -> PerLayerTable | None:
    """The model's part of per-layer embeddings, or None.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    spec = config.per_layer_input
    if spec is None:
        return None
    width = config.n_layers * spec.width
    return PerLayerTable(
        token_embd=read.packed(PER_LAYER_ROWS, config.n_vocab, width),
        model_proj=read.linear("per_layer_model_proj", width, config.n_embd),
        proj_norm=read.norm(spec.norm, spec.width),
    )


def altup_projections(read: TensorReader, config: ModelSpec) -> AltUpProjections | None:
    """The model's part of AltUp, or None.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    if config.altup is None:
        return None
    n, n_embd = config.altup.n_streams - 1, config.n_embd
    return AltUpProjections(
        proj=read.linears("altup_proj", n, n_embd, n_embd),
        unembd_proj=read.linears("altup_unembd_proj", n, n_embd, n_embd),
    )


def per_layer_input_weights(
    read: TensorReader, spec: PerLayerInputSpec, n_embd: int, at: str
) -> PerLayerInputWeights:
    """The per-layer input of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    return PerLayerInputWeights(
        inp_gate=read.linear(f"{at}inp_gate", spec.width, n_embd),
        proj=read.linear(f"{at}proj", n_embd, spec.width),
        post_norm=read.norm(spec.post_norm, n_embd, at),
    )


def laurel_weights(read: TensorReader, spec: LaurelSpec, n_embd: int, at: str) -> LaurelWeights:
    """Laurel of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    return LaurelWeights(
        laurel_l=read.linear(f"{at}laurel_l", spec.rank, n_embd),
        laurel_r=read.linear(f"{at}laurel_r", n_embd, spec.rank),
        post_norm=read.norm(spec.norm, n_embd, at),
    )


def altup_weights(read: TensorReader, spec: AltUpSpec, n_embd: int, at: str) -> AltUpWeights:
    """AltUp of the layer whose tensors' names begin with `at`.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    n = spec.n_streams
    return AltUpWeights(
        router=read.linear(f"{at}altup_router", n, n_embd),
        router_norm=read.norm(spec.router_norm, n_embd, at),
        predict_coef=read.vector(f"{at}altup_predict_coef.weight", n * n, n),
        correct_coef=read.vector(f"{at}altup_correct_coef.weight", n, n),
        correct_scale=read.vector(f"{at}altup_correct_scale.weight", n_embd),
    )


_NO_BYTES = replace(FORMATS["f32"], planes=(Plane("values", 0),))
"""Rows of any length take no memory."""


class _Nothing(PackedTensor):
    """A tensor without bytes, whose values are zeros that share one place."""

    def decode(self) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), self.shape)


@dataclass(frozen=True)
class _NothingPrepared:
    """A backend's stand-in, which prepares nothing."""

    arrays: Arrays = field(default_factory=NumpyArrays)
    memory: DeviceMemory | None = None

    def prepare(self, weight: PackedTensor) -> PackedTensor:
        return as_in_file(weight)

    def prepare_embedding(self, weight: PackedTensor) -> PackedTensor:
        return as_in_file(weight)


@dataclass
class _Listing:
    """A `TensorSource` without data, which remembers what it was asked for.

    Attributes:
        is_there: whether the file has an optional tensor, by its name.
        check: called with each tensor's name and shape, before anything of that shape is made.
    """

    is_there: Callable[[str], bool]
    check: Callable[[str, tuple[int, ...]], Any] = lambda name, shape: None
    asked: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return self.is_there(name)

    def packed(self, name: str, shape: tuple[int, ...]) -> PackedTensor:
        self.check(name, shape)
        self.asked[name] = shape
        return _Nothing(_NO_BYTES, np.empty((*shape[:-1], 0), np.uint8), shape)

    def release(self, name: str) -> None:
        pass


def listed_tensors(
    config: ModelSpec, is_there: Callable[[str], bool]
) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model's tensors.

    Args:
        is_there: whether the file has a tensor that it may do without, by its name.
    """
    return _listed(_Listing(is_there), config)


def _listed(listing: _Listing, config: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    model_weights(TensorReader(listing, _NothingPrepared()), config)
    return list(listing.asked.items())


def checked_spec(header: ModelHeader) -> ModelSpec:
    """Layers, sizes and constants of the model in a file; its tensors confirm the sizes.

    Raises:
        ModelFileError: see `model_spec` and `check_tensors`.
    """
    config = model_spec(header)
    check_tensors(header, config)
    return config


def check_tensors(header: ModelHeader, config: ModelSpec) -> None:
    """Look at all tensors that a model needs before any is read.

    No size from the keys is used before a tensor confirms it.

    Raises:
        ModelFileError: one is missing, or of the wrong shape; or a matrix has a scale beside it.
    """
    listing = _Listing(header.tensors.__contains__, partial(check_tensor, header))
    listed = _listed(listing, config)
    names = {name for name, _ in listed}
    for name, _ in listed:
        scale = name.removesuffix(".weight") + ".scale"
        if name.endswith(".weight") and scale in header.tensors and scale not in names:
            raise ModelFileError(
                f"tensor {quoted(scale)} scales a whole matrix, which is not supported",
                hint="a file without tensors whose names end in .scale would work",
            )


def lock_weights(weights: ModelWeights, backend: Backend) -> str | None:
    """Lock what products read for as long as it exists; a warning, if not all can be locked.

    Panels are made from a file's rows, which nothing reads any more, so panels are locked instead.
    """
    if backend.hardware:
        return "mlock has no effect: the weights are in the memory of the GPU"
    ranges = ranges_of(weights)
    locked = lock(ranges)
    if locked.ranges:
        weakref.finalize(weights, unlock, locked.ranges).atexit = False
    if locked.problem is None:
        return None
    n_bytes = sum(n for _, n in ranges)
    return f"only {byte_size(min(locked.n_bytes, n_bytes))} of {byte_size(n_bytes)} of weights " + (
        f"could be locked in memory: {locked.problem}"
    )


def ranges_of(weights: Any) -> list[Range]:
    """Addresses and bytes of what the products, norms and look-ups read, each once.

    Args:
        weights: all of them, or a part.
    """
    found: dict[int, int] = {}
    for tensor in tensors_of(weights):
        arrays = tensor.operands if isinstance(tensor, PackedTensor) else (tensor,)
        for array in arrays:
            address = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
            found[address] = max(found.get(address, 0), array.nbytes)
    return sorted(found.items())
