"""The tensors of attention over latents.

Older files hold `attn_kv_b`, [n_heads * (nope + value), latent], which makes each head's key and
value of a latent. Its parts are what newer files hold apart: `attn_v_b` as it is, and `attn_k_b`
transposed. Float types are transposed as they are; the values of others are rounded to F16 for it,
an error of at most 2^-11 of each, below that of the type.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from localkv.arch.spec import LatentAttentionSpec
from localkv.formats import FORMATS
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.layer_weights import LatentAttentionWeights
from localkv.loader.tensor_reader import TensorReader

FLOATS = ("f32", "f16", "bf16")
"""Types that are transposed as they are."""


def latent_weights(
    read: TensorReader, spec: LatentAttentionSpec, n_embd: int, at: str
) -> LatentAttentionWeights:
    """Those of the layer whose tensors' names begin with `at`.

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
