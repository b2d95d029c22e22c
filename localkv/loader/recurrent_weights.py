"""The tensors of recurrent mixers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from localkv.cache.arrays import Array
from localkv.kernels.layer_weights import (
    DeltaNetWeights,
    Linear,
    Mamba2Weights,
    Norm,
    RecurrentWeights,
    ShortConvWeights,
)
from localkv.loader.tensor_reader import TensorReader


def recurrent_weights(
    read: TensorReader, spec: RecurrentSpec, n_embd: int, at: str
) -> RecurrentWeights:
    """Those of the layer whose tensors' names begin with `at`.

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
