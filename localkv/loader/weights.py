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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import (
    PER_LAYER_ROWS,
    AltUpSpec,
    AttentionSpec,
    ClassifierSpec,
    DeltaNetSpec,
    EncoderAttentionSpec,
    Ffn,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    Mixer,
    MlpAndMoeSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    PredictionSpec,
    ShortConvSpec,
)
from localkv.cache.arrays import Array, Arrays
from localkv.errors import ModelFileError, byte_size, quoted
from localkv.kernels.backend import Backend, as_in_file
from localkv.kernels.cpu.arrays import NumpyArrays
from localkv.kernels.device_memory import DeviceMemory
from localkv.kernels.layer_kinds import check_places
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
    ShortConvWeights,
    tensors_of,
)
from localkv.kernels.places import Places
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.model_header import ModelHeader, model_spec
from localkv.loader.smoothing import SmoothedTensors, Smoothing
from localkv.loader.tensor_reader import (
    DecodedTensors,
    FileTensors,
    TensorReader,
    TensorSource,
    check_tensor,
)
from localkv.model import ClassifierWeights, ModelWeights, PredictionWeights, Transformer
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import Plane
from localkv.quant_formats.packed_tensor import PackedTensor
from localkv.system.machine_memory import Range, lock, unlock


def load_model(
    path: str | os.PathLike[str] | GGUFFile,
    places: Backend | Places,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    smoothing: Smoothing | None = None,
    decoded: Collection[str] = (),
    late: bool = False,
    predicts: bool = False,
) -> tuple[Transformer, list[str]]:
    """The model in a GGUF file, in its places.

    Args:
        path: the file.
        places: prepare the weights as they want them; a backend is one place for all.
        on_layer: called with the layers that are loaded, of how many.
        smoothing: of K and V, folded into the weights.
        decoded: names of tensors that become float32 (`ModelMemory.decoded`).
        late: weights may be laid out while the model is in use (`Backend.late`), where they are
            views of the file, and all in one place.
        predicts: the block that predicts a further token is read, too.

    Returns:
        the model, and the names of tensors that it does not know.

    Raises:
        ModelFileError: the file is malformed, its architecture, a type or on this backend a layer
            is not supported, or a tensor is missing or of the wrong shape.
    """
    gguf = path if isinstance(path, GGUFFile) else open_gguf(path)
    config = model_spec(gguf)
    if isinstance(places, Backend):
        places = Places.one(places, config.n_layers)
    check_places(places, config)
    source: TensorSource = FileTensors(gguf)
    if smoothing is not None:
        source = SmoothedTensors(source, smoothing.tensor_factors(config, gguf.tensors))
    if decoded:
        source = DecodedTensors(source, decoded)
    read = TensorReader(
        source,
        places.embedding,
        halve_activations=config.has_experts,
        late=places.whole.late if late and smoothing is None and not decoded else None,
    )
    weights = model_weights(read, config, on_layer, predicts=predicts, places=places)
    unused = [name for name in gguf.tensors if name not in read.taken and not config.ignores(name)]
    return Transformer(config, weights, places), unused


def model_weights(
    read: TensorReader,
    config: ModelSpec,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
    *,
    predicts: bool = False,
    places: Places | None = None,
) -> ModelWeights:
    """All tensors that a model has.

    Args:
        places: prepare them; None for the reader's backend.
        on_layer: called with the layers that are read, of how many.
        predicts: the block that predicts a further token is read, too.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    n_vocab, n_embd = config.n_vocab, config.n_embd
    token_embd = read.embedding("token_embd.weight", n_vocab, n_embd)
    behind = read if places is None else read.by(places.output)
    if config.is_encoder:
        output = Linear(token_embd)
    elif read.has("output.weight"):
        output = behind.linear("output", n_vocab, n_embd)
    elif not token_embd.reads_rows and behind is read:
        output = Linear(token_embd)
    else:
        output = Linear(behind.late_matrix("token_embd.weight", n_vocab, n_embd))
    divisors = {
        name: read.values(name, rope.n_divisors or rope.n_dims // 2)[: rope.n_dims // 2]
        for rope in config.ropes
        for name in (rope.divisors, rope.long_divisors)
        if name
    }
    layers, last = [], None if places is None else places.of_layer(config.n_layers - 1)
    for i, spec in enumerate(config.layers):
        on_layer(i, config.n_layers)
        own = read.layer(i)
        layer = own if places is None else own.by(places.of_layer(i))
        block = layer if places is None else own.by(places.of_block(i))
        layers.append(layer_weights(layer, spec, config.altup, n_embd, block))
    on_layer(config.n_layers, config.n_layers)
    weights = ModelWeights(
        token_embd=token_embd,
        layers=tuple(layers),
        output_norm=behind.norm(config.output_norm, n_embd),
        output=output,
        rope_divisors=divisors,
        per_layer=per_layer_table(read, config),
        altup=altup_projections(read, config, read if places is None else read.by(last)),
        position_embd=read.embedding("position_embd.weight", config.n_positions, n_embd)
        if config.n_positions
        else None,
        token_type=read.vector("token_types.weight", config.n_token_types, n_embd)[0]
        if config.n_token_types
        else None,
        embedding_norm=read.norm(config.embedding_norm, n_embd) if config.embedding_norm else None,
        classifier=classifier_weights(behind, config.classifier, n_embd),
        dense=dense_weights(behind, config),
        names=read.names,
    )
    if not predicts or config.prediction is None:
        return weights
    prediction = prediction_weights(
        read.layer(config.prediction.block), config, config.prediction, weights
    )
    return replace(weights, prediction=prediction)


def dense_weights(read: TensorReader, config: ModelSpec) -> tuple[Linear, ...]:
    """The matrices that embeddings are multiplied with after their pooling."""
    matrices, n_in = [], config.n_embd
    for name, n_out in config.dense:
        matrices.append(read.linear(name, n_out, n_in))
        n_in = n_out
    return tuple(matrices)


def classifier_weights(
    read: TensorReader, spec: ClassifierSpec | None, n_embd: int
) -> ClassifierWeights | None:
    """The head that scores texts, if the model has one."""
    if spec is None:
        return None
    n_in = spec.n_hidden or n_embd
    return ClassifierWeights(
        cls=read.linear("cls", spec.n_hidden, n_embd) if spec.n_hidden else None,
        norm=None if spec.norm is None else read.norm(spec.norm, n_in),
        output=read.linear("cls.output", spec.n_classes, n_in) if spec.n_classes else None,
    )


def prediction_weights(
    read: TensorReader, config: ModelSpec, spec: PredictionSpec, model: ModelWeights
) -> PredictionWeights:
    """The block that `read` hands out, which predicts a further token.

    It may have an embedding, a last norm and an output matrix of its own; else it has `model`'s.
    """
    n_vocab, n_embd = config.n_vocab, config.n_embd
    token_embd, output, output_norm = model.token_embd, model.output, model.output_norm
    if read.has("nextn.embed_tokens.weight"):
        token_embd = read.embedding("nextn.embed_tokens.weight", n_vocab, n_embd)
    if read.has("nextn.shared_head_head.weight"):
        output = read.linear("nextn.shared_head_head", n_vocab, n_embd)
    if read.has(f"{spec.output_norm.tensor}.weight"):
        output_norm = read.norm(spec.output_norm, n_embd)
    return PredictionWeights(
        eh_proj=read.linear("nextn.eh_proj", n_embd, 2 * n_embd),
        embedding_norm=read.norm(spec.embedding_norm, n_embd),
        hidden_norm=read.norm(spec.hidden_norm, n_embd),
        model=replace(
            model,
            token_embd=token_embd,
            layers=(layer_weights(read, spec.layer, None, n_embd),),
            output_norm=output_norm,
            output=output,
        ),
    )


def layer_weights(
    read: TensorReader,
    spec: LayerSpec,
    altup: AltUpSpec | None,
    n_embd: int,
    block: TensorReader | None = None,
) -> LayerWeights:
    """The weights of the layer that `read` hands out.

    Args:
        block: hands out the tensors of its feed-forward block, for the place where that is.
    """
    apart: LayerWeights | None = None
    if block is not None and block.backend is not read.backend and spec.ffn is not None:
        alone = replace(spec, mixer=None, beside=None, mixed_norm=None, output_scale=None)
        alone = replace(alone, per_layer_input=None, laurel=None)
        apart = layer_weights(block, alone, None, n_embd)
        spec = replace(spec, ffn=None, hidden_norm=None)
    per_layer, laurel = spec.per_layer_input, spec.laurel

    def norm(of: NormSpec | None, size: int = n_embd) -> Norm | None:
        return None if of is None else read.norm(of, size)

    scale = 1.0
    if spec.output_scale is not None:
        scale = float(read.values(f"{spec.output_scale}.weight", 1)[0])
    return LayerWeights(
        mixer=None if spec.mixer is None else mixer_weights(read, spec.mixer, n_embd),
        ffn=None if spec.ffn is None else ffn_weights(read, spec.ffn, n_embd),
        attn_norm=norm(spec.attn_norm),
        ffn_norm=norm(spec.ffn_norm),
        post_attn_norm=norm(spec.post_attn_norm),
        post_ffn_norm=norm(spec.post_ffn_norm),
        mixed_norm=norm(spec.mixed_norm, spec.mixer.width if spec.mixer else 0),
        hidden_norm=norm(spec.hidden_norm, spec.mlp.n_ff if spec.mlp else 0),
        attn_sum_norm=norm(spec.attn_sum_norm),
        attn_norm_2=norm(spec.attn_norm_2),
        ffn_sum_norm=norm(spec.ffn_sum_norm),
        output_scale=scale,
        per_layer_input=None
        if per_layer is None
        else PerLayerInputWeights(
            inp_gate=read.linear("inp_gate", per_layer.width, n_embd),
            proj=read.linear("proj", n_embd, per_layer.width),
            post_norm=read.norm(per_layer.post_norm, n_embd),
        ),
        laurel=None
        if laurel is None
        else LaurelWeights(
            laurel_l=read.linear("laurel_l", laurel.rank, n_embd),
            laurel_r=read.linear("laurel_r", n_embd, laurel.rank),
            post_norm=read.norm(laurel.norm, n_embd),
        ),
        altup=None if altup is None else altup_weights(read, altup, n_embd),
        beside=None if spec.beside is None else mixer_weights(read, spec.beside, n_embd),
        apart=apart,
    )


def mixer_weights(read: TensorReader, spec: Mixer, n_embd: int) -> MixerWeights:
    """The mixer of a layer."""
    match spec:
        case AttentionSpec():
            return _attention(read, spec, n_embd)
        case EncoderAttentionSpec():
            return _attention(read, spec.attention, n_embd)
        case LatentAttentionSpec():
            return latent_weights(read, spec, n_embd)
        case DeltaNetSpec():
            return _delta_net(read, spec, n_embd)
        case ShortConvSpec():
            return _short_conv(read, spec, n_embd)
        case Mamba2Spec():
            return _mamba2(read, spec, n_embd)


def _attention(read: TensorReader, spec: AttentionSpec, n_embd: int) -> AttentionWeights:
    attn_q, attn_k, attn_v = _qkv(read, spec, n_embd)
    q_norm, k_norm, v_norm, sinks = spec.q_norm, spec.k_norm, spec.v_norm, spec.sinks
    n_kv_heads, stores = spec.n_kv_heads, spec.kv_from is None
    return AttentionWeights(
        attn_q=attn_q,
        attn_k=attn_k,
        attn_v=attn_v,
        output=read.linear("attn_output", n_embd, spec.width),
        attn_q_norm=read.head_norm(q_norm, spec.n_heads, spec.key_dim) if q_norm else None,
        attn_k_norm=read.head_norm(k_norm, n_kv_heads, spec.key_dim) if k_norm and stores else None,
        v_norm=read.head_norm(v_norm, n_kv_heads, spec.value_dim) if v_norm and stores else None,
        sinks=None if sinks is None else read.vector(f"{sinks}.weight", spec.n_heads),
        attn_gate=read.linear("attn_gate", spec.n_heads, n_embd) if spec.head_gated else None,
    )


def _qkv(
    read: TensorReader, spec: AttentionSpec, n_embd: int
) -> tuple[Linear, Linear | None, Linear | None]:
    """Projections of q, K and V, from one tensor or from several."""
    n_q = spec.n_heads * spec.key_dim * (2 if spec.gated else 1)
    n_k, n_v = spec.n_kv_heads * spec.key_dim, spec.n_kv_heads * spec.value_dim
    bias = spec.qkv_bias
    if spec.kv_from is None and read.has("attn_qkv.weight"):
        apart = read.has("attn_q.bias")
        attn_q, attn_k, attn_v = read.fused_linear(
            "attn_qkv", (n_q, n_k, n_v), n_embd, bias_required=bias and not apart
        )
        if not apart:
            return attn_q, attn_k, attn_v
        return (
            replace(attn_q, bias=read.vector("attn_q.bias", n_q)),
            replace(attn_k, bias=read.vector("attn_k.bias", n_k)),
            replace(attn_v, bias=read.vector("attn_v.bias", n_v)),
        )

    def linear(name: str, n_out: int) -> Linear:
        return read.linear(name, n_out, n_embd, bias_required=bias)

    stores = spec.kv_from is None
    return (
        _gated_q(read, spec, n_embd) if spec.gated else linear("attn_q", n_q),
        linear("attn_k", n_k) if stores else None,
        linear("attn_v", n_v) if stores and not spec.value_from_key else None,
    )


def _gated_q(read: TensorReader, spec: AttentionSpec, n_embd: int) -> Linear:
    """Each head's q, then its gate, which a file may have as a tensor of its own."""
    if not read.has("attn_gate.weight"):
        n_q = 2 * spec.n_heads * spec.key_dim
        return read.linear("attn_q", n_q, n_embd, bias_required=spec.qkv_bias)
    names = ("attn_q", "attn_gate")
    return read.interleaved(names, spec.n_heads, spec.key_dim, n_embd)


FLOATS = ("f32", "f16", "bf16")
"""Types that are transposed as they are."""


def latent_weights(
    read: TensorReader, spec: LatentAttentionSpec, n_embd: int
) -> LatentAttentionWeights:
    """Attention over latents of a layer.

    Older files hold `attn_kv_b`, [n_heads * (nope + value), latent], which makes each head's key
    and value of a latent. Its parts are what newer files hold as two tensors: `attn_v_b` as it is,
    and `attn_k_b` transposed. Float types are transposed as they are; the values of others are
    rounded to F16 for it, an error of at most 2^-11 of each, below the type's own.
    """
    n_q = spec.n_heads * (spec.nope_dim + spec.rope_dim)
    rank, latent = spec.q_lora_rank, spec.latent_dim
    attn_q_a = None
    q_norm = spec.q_latent_norm
    if rank:
        attn_q_a = read.linear("attn_q_a", rank, n_embd)
        attn_q = read.linear("attn_q_b", n_q, rank)
    else:
        attn_q = read.linear("attn_q", n_q, n_embd)
    k_b, v_b = _key_and_value(read, spec)
    return LatentAttentionWeights(
        attn_q=attn_q,
        attn_q_a=attn_q_a,
        attn_q_a_norm=read.norm(q_norm, rank) if q_norm else None,
        attn_kv_a_mqa=read.linear("attn_kv_a_mqa", latent + spec.rope_dim, n_embd),
        attn_kv_a_norm=read.norm(spec.latent_norm, latent),
        attn_k_b=k_b,
        attn_v_b=v_b,
        output=read.linear("attn_output", n_embd, spec.width),
        attn_gate=read.linear("attn_gate", spec.n_heads, n_embd) if spec.head_gated else None,
    )


def _key_and_value(
    read: TensorReader, spec: LatentAttentionSpec
) -> tuple[PackedTensor, PackedTensor]:
    """What makes latents of queries, and values of latents."""
    n_heads, nope, latent, value = spec.n_heads, spec.nope_dim, spec.latent_dim, spec.value_dim
    old = "attn_kv_b.weight"
    if not read.has(old):
        return (
            read.matrix("attn_k_b.weight", n_heads, latent, nope),
            read.matrix("attn_v_b.weight", n_heads, value, latent),
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


def _delta_net(read: TensorReader, spec: DeltaNetSpec, n_embd: int) -> DeltaNetWeights:
    if spec.fades_by_channel:
        return _kimi_delta(read, spec, n_embd)
    attn_qkv, attn_gate = _qkvz(read, spec, n_embd)
    ssm_beta, ssm_alpha = _beta_alpha(read, spec, n_embd)
    n_heads = spec.n_value_heads
    return DeltaNetWeights(
        attn_qkv=attn_qkv,
        attn_gate=attn_gate,
        ssm_beta=ssm_beta,
        ssm_alpha=ssm_alpha,
        ssm_conv1d=read.vector("ssm_conv1d.weight", spec.conv_channels, spec.conv_kernel),
        ssm_dt=read.vector("ssm_dt.bias", n_heads),
        ssm_a=read.vector("ssm_a", n_heads),
        ssm_norm=read.norm(spec.norm, spec.head_dim),
        output=read.linear("ssm_out", n_embd, spec.width),
    )


def _kimi_delta(read: TensorReader, spec: DeltaNetSpec, n_embd: int) -> DeltaNetWeights:
    """Kimi Delta Attention: q, k and v have tensors of their own, as their convolutions have."""
    width, n_heads, rank = spec.width, spec.n_value_heads, spec.low_rank
    qkv, k, v = _kimi_qkv(read, width, n_embd)
    convs = [read.values(f"ssm_conv1d_{part}.weight", width, spec.conv_kernel) for part in "qkv"]
    f, g = ("ssm_f_b", "ssm_g_b") if rank else ("ssm_f_a", "ssm_g_a")
    return DeltaNetWeights(
        attn_qkv=qkv,
        attn_k=k,
        attn_v=v,
        attn_gate=read.linear(g, width, rank or n_embd),
        ssm_beta=read.linear("ssm_beta", n_heads, n_embd),
        ssm_alpha=read.linear(f, width, rank or n_embd),
        ssm_f_a=read.linear("ssm_f_a", rank, n_embd) if rank else None,
        ssm_g_a=read.linear("ssm_g_a", rank, n_embd) if rank else None,
        ssm_conv1d=read.floating(np.concatenate(convs)),
        ssm_dt=read.vector("ssm_dt.bias", width),
        ssm_a=read.vector("ssm_a", n_heads, 1).reshape(-1),
        ssm_norm=read.norm(spec.norm, spec.head_dim),
        output=read.linear("attn_output", n_embd, width),
    )


def _kimi_qkv(
    read: TensorReader, width: int, n_embd: int
) -> tuple[Linear, Linear | None, Linear | None]:
    """One matrix of q, k and v; three where the file has them in several types."""
    if read.has("attn_qkv.weight"):
        return read.linear("attn_qkv", 3 * width, n_embd), None, None
    names = ("attn_q", "attn_k", "attn_v")
    if len({read.type_of(f"{name}.weight", width, n_embd) for name in names}) == 1:
        return read.interleaved(names, 1, width, n_embd), None, None
    q, k, v = (read.linear(name, width, n_embd) for name in names)
    return q, k, v


def _qkvz(read: TensorReader, spec: DeltaNetSpec, n_embd: int) -> tuple[Linear, Linear]:
    """q, k, v and z; in files of the first converter one tensor, by key head."""
    if not read.has("ssm_in.weight"):
        return (
            read.linear("attn_qkv", spec.conv_channels, n_embd),
            read.linear("attn_gate", spec.width, n_embd),
        )
    keys, values = spec.head_dim, spec.width // spec.n_key_heads
    parts = ((keys, keys, values), (values,))
    attn_qkv, attn_gate = read.rows_of("ssm_in", spec.n_key_heads, parts, n_embd)
    return attn_qkv, attn_gate


def _beta_alpha(read: TensorReader, spec: DeltaNetSpec, n_embd: int) -> tuple[Linear, Linear]:
    """What makes beta and alpha; in Qwen3-Next's files one tensor, by key head."""
    n_heads = spec.n_value_heads
    if not read.has("ssm_ba.weight"):
        return (read.linear("ssm_beta", n_heads, n_embd), read.linear("ssm_alpha", n_heads, n_embd))
    n_shared = n_heads // spec.n_key_heads
    parts = ((n_shared,), (n_shared,))
    beta, alpha = read.rows_of("ssm_ba", spec.n_key_heads, parts, n_embd)
    return beta, alpha


def _short_conv(read: TensorReader, spec: ShortConvSpec, n_embd: int) -> ShortConvWeights:
    return ShortConvWeights(
        in_proj=read.linear("shortconv.in_proj", 3 * spec.width, n_embd),
        conv=read.vector("shortconv.conv.weight", spec.width, spec.kernel),
        output=read.linear("shortconv.out_proj", n_embd, spec.width),
    )


def _mamba2(read: TensorReader, spec: Mamba2Spec, n_embd: int) -> Mamba2Weights:
    channels, n_heads = spec.conv_channels, spec.n_heads
    norm: Norm | None = None
    if spec.norm is not None:
        groups = spec.n_groups, spec.width // spec.n_groups
        norm = Norm(spec.norm, read.vector(f"{spec.norm.tensor}.weight", *groups).reshape(-1))
    return Mamba2Weights(
        ssm_in=read.linear("ssm_in", spec.width + channels + n_heads, n_embd),
        ssm_conv1d=read.vector("ssm_conv1d.weight", channels, spec.conv_kernel),
        ssm_conv1d_bias=read.optional_vector("ssm_conv1d.bias", channels),
        ssm_dt=read.vector("ssm_dt.bias", n_heads),
        ssm_a=read.vector("ssm_a", n_heads, 1).reshape(-1),
        ssm_d=read.vector("ssm_d", n_heads, 1).reshape(-1),
        ssm_norm=norm,
        output=read.linear("ssm_out", n_embd, spec.width),
    )


def ffn_weights(read: TensorReader, spec: Ffn, n_embd: int) -> FfnWeights:
    """The feed-forward block of a layer."""
    match spec:
        case MlpSpec():
            return _mlp(read, spec, n_embd)
        case MoeSpec():
            return _moe(read, spec, n_embd)
        case MlpAndMoeSpec():
            return MlpAndMoeWeights(
                mlp=_mlp(read, spec.mlp, n_embd),
                moe=_moe(read, spec.moe, n_embd),
                post_mlp_norm=read.norm(spec.post_mlp_norm, n_embd),
                post_moe_norm=read.norm(spec.post_moe_norm, n_embd),
                moe_norm=read.norm(spec.moe_norm, n_embd),
            )


def _mlp(read: TensorReader, spec: MlpSpec, n_embd: int, suffix: str = "") -> MlpWeights:
    gate_name, up_name = f"ffn_gate{suffix}", f"ffn_up{suffix}"
    gate: Linear | None = None
    if not spec.gated:
        up = read.linear(up_name, spec.n_ff, n_embd)
    elif read.has(f"{gate_name}.weight"):
        gate = read.linear(gate_name, spec.n_ff, n_embd)
        up = read.linear(up_name, spec.n_ff, n_embd)
    else:  # one tensor, the gate's rows first
        gate, up = read.fused_linear(up_name, (spec.n_ff, spec.n_ff), n_embd)
    return MlpWeights(gate, up, read.linear(f"ffn_down{suffix}", n_embd, spec.n_ff))


def _moe(read: TensorReader, moe: MoeSpec, n_embd: int) -> MoeWeights:
    n_experts, n_ff, latent = moe.n_experts, moe.n_ff, moe.latent_dim
    width = latent or n_embd

    def stack(name: str, n_out: int, n_in: int) -> PackedTensor:
        return read.late_matrix(f"ffn_{name}_exps.weight", n_experts, n_out, n_in)

    def bias(name: str, n_out: int) -> Array | None:
        tensor = f"ffn_{name}_exps.bias"
        return read.vector(tensor, n_experts, n_out) if moe.biased or read.has(tensor) else None

    experts: dict[str, Any]
    if moe.gated and read.has("ffn_gate_up_exps.weight"):
        experts = {
            "ffn_gate_exps": None,
            "ffn_up_exps": None,
            "ffn_gate_up_exps": stack("gate_up", 2 * n_ff, width),
            "gate_up_bias": bias("gate_up", 2 * n_ff),
        }
    else:
        experts = {
            "ffn_gate_exps": stack("gate", n_ff, width) if moe.gated else None,
            "ffn_up_exps": stack("up", n_ff, width),
            "gate_bias": bias("gate", n_ff) if moe.gated else None,
            "up_bias": bias("up", n_ff),
        }
    # a few files leave ".bias" out
    selection = "exp_probs_b" if read.has("exp_probs_b") else "exp_probs_b.bias"
    return MoeWeights(
        ffn_gate_inp=read.linear("ffn_gate_inp", n_experts, n_embd, bias_required=moe.biased),
        **experts,
        ffn_down_exps=stack("down", width, n_ff),
        down_bias=bias("down", width),
        down_scale=read.optional_vector("ffn_down_exps.scale", n_experts),
        exp_probs_b=read.vector(selection, n_experts) if moe.selection_bias else None,
        shared=_mlp(read, moe.shared, n_embd, moe.shared_suffix) if moe.n_ff_shared else None,
        ffn_gate_inp_shexp=read.vector("ffn_gate_inp_shexp.weight", n_embd)
        if moe.shared_gated
        else None,
        router_norm=_router_norm(read, moe.router_norm, n_embd),
        ffn_latent_down=read.linear("ffn_latent_down", latent, n_embd) if latent else None,
        ffn_latent_up=read.linear("ffn_latent_up", n_embd, latent) if latent else None,
    )


def _router_norm(read: TensorReader, spec: NormSpec | None, n_embd: int) -> Norm | None:
    if spec is None:
        return None
    scale = read.values(f"{spec.tensor}.scale", n_embd) / np.float32(math.sqrt(n_embd))
    return Norm(spec, read.floating(scale))


def per_layer_table(read: TensorReader, config: ModelSpec) -> PerLayerTable | None:
    """The model's part of per-layer embeddings, or None."""
    spec = config.per_layer_input
    if spec is None:
        return None
    width = config.n_layers * spec.width
    return PerLayerTable(
        token_embd=read.packed(PER_LAYER_ROWS, config.n_vocab, width),
        model_proj=read.linear("per_layer_model_proj", width, config.n_embd),
        proj_norm=read.norm(spec.norm, spec.width),
    )


def altup_projections(
    read: TensorReader, config: ModelSpec, behind: TensorReader
) -> AltUpProjections | None:
    """The model's part of AltUp, or None; streams become one where `behind` has the last layer."""
    if config.altup is None:
        return None
    n, n_embd = config.altup.n_streams - 1, config.n_embd
    return AltUpProjections(
        proj=read.linears("altup_proj", n, n_embd, n_embd),
        unembd_proj=behind.linears("altup_unembd_proj", n, n_embd, n_embd),
    )


def altup_weights(read: TensorReader, spec: AltUpSpec, n_embd: int) -> AltUpWeights:
    """AltUp of a layer."""
    n = spec.n_streams
    return AltUpWeights(
        router=read.linear("altup_router", n, n_embd),
        router_norm=read.norm(spec.router_norm, n_embd),
        predict_coef=read.vector("altup_predict_coef.weight", n * n, n),
        correct_coef=read.vector("altup_correct_coef.weight", n, n),
        correct_scale=read.vector("altup_correct_scale.weight", n_embd),
    )


_NO_BYTES = replace(FORMATS["f32"], planes=(Plane("values", 0),))
"""Rows of any length take no memory."""


class _Nothing(PackedTensor):
    """A tensor without bytes, whose values are zeros that share one place."""

    def decode(self) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0), self.shape)


@dataclass(frozen=True)
class NothingPrepared:
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


def _listed(
    listing: _Listing, config: ModelSpec, *, predicts: bool = False
) -> list[tuple[str, tuple[int, ...]]]:
    model_weights(TensorReader(listing, NothingPrepared()), config, predicts=predicts)
    return list(listing.asked.items())


def checked_spec(header: ModelHeader) -> ModelSpec:
    """Layers, sizes and constants of the model in a file; its tensors confirm the sizes.

    Raises:
        ModelFileError: see `model_spec` and `check_tensors`.
    """
    config = model_spec(header)
    check_tensors(header, config)
    return config


def check_tensors(header: ModelHeader, config: ModelSpec, *, predicts: bool = False) -> None:
    """Look at all tensors that a model needs before any is read.

    No size from the keys is used before a tensor confirms it.

    Args:
        predicts: the model needs the block that predicts a further token, too.

    Raises:
        ModelFileError: one is missing, or of the wrong shape; or a matrix has a scale beside it.
    """
    listing = _Listing(header.tensors.__contains__, partial(check_tensor, header))
    listed = _listed(listing, config, predicts=predicts)
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
    ranges = ranges_of(weights)
    if backend.hardware and not ranges:
        return "mlock has no effect: the weights are in the memory of the GPU"
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
    """Addresses and bytes of what the products, norms and look-ups read in the machine's memory,
    each once.

    Args:
        weights: all of them, or a part.
    """
    found: dict[int, int] = {}
    for tensor in tensors_of(weights):
        arrays = tensor.operands if isinstance(tensor, PackedTensor) else (tensor,)
        for array in arrays:
            if getattr(array, "is_cuda", False):
                continue
            address = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
            found[address] = max(found.get(address, 0), array.nbytes)
    return sorted(found.items())
