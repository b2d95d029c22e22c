"""What a model file would say of layers, widths and experts, made from a few numbers of a model.

A shape holds what its family (`arch/`) asks for; what only matters to text or to accuracy (norms'
epsilons, RoPE's bases) has one plausible value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PRESENT = ("output.weight", "ffn_gate.weight", "ffn_gate_shexp.weight")
"""Ends of names of tensors that most files have, of those that a file may do without."""
ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
TIED = PRESENT[1:]
"""The same for models whose output matrix is the embedding."""

GRANITE_FACTORS: dict[str, Any] = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0078125,
    "logit_scale": 16.0,
}
"""What Granite multiplies and divides by."""


@dataclass(frozen=True, eq=False)
class KnownShape:
    """A model's shape.

    Attributes:
        name: as `--synthetic` takes it.
        architecture: `general.architecture`.
        n_vocab: rows of the embedding.
        keys: metadata without the architecture's prefix.
        present: ends of names of the tensors that it has, of those that a file may do without.
        tensors: shapes of tensors by which the family tells variants apart.
    """

    name: str
    architecture: str
    n_vocab: int
    keys: Mapping[str, Any]
    present: tuple[str, ...] = PRESENT
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def output_matrix(self) -> str:
        """The tensor that logits are made with."""
        return "output.weight" if self.has("output.weight") else "token_embd.weight"

    def has(self, tensor: str) -> bool:
        """Whether a file of it has an optional tensor."""
        return tensor in self.tensors or tensor.endswith(self.present)


def any_shape(
    name: str,
    architecture: str,
    n_vocab: int,
    sizes: tuple[int, int, int],
    heads: tuple[Any, ...],
    n_ctx: int,
    *,
    present: tuple[str, ...] = PRESENT,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    **more: Any,
) -> KnownShape:
    """A shape.

    Args:
        sizes: layers, width of the residual stream, and of the dense feed-forward block (0: none).
        heads: of q, of K and V, and channels of a head, if that is no matter of division.
        more: further keys, with "__" for their dots.
    """
    n_layers, n_embd, n_ff = sizes
    keys: dict[str, Any] = {
        "block_count": n_layers,
        "embedding_length": n_embd,
        "context_length": n_ctx,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
    }
    if n_ff:
        keys["feed_forward_length"] = n_ff
    if len(heads) > 2:
        keys |= {"attention.key_length": heads[2], "attention.value_length": heads[2]}
    keys |= {key.replace("__", "."): value for key, value in more.items()}
    return KnownShape(name, architecture, n_vocab, keys, present, tensors or {})


def expert_keys(n: int, used: int, n_ff: int, **more: Any) -> dict[str, Any]:
    """Keys of routed experts: how many, used, width of one."""
    keys = {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": n_ff}
    return {**keys, **more}


def llama_shape(name: str, sizes: tuple[int, int, int], n_heads: int, **more: Any) -> KnownShape:
    """A Llama 3 model: 8 KV heads, 128k tokens of context."""
    return any_shape(name, "llama", 128256, sizes, (n_heads, 8), 1 << 17, **more)


def qwen3_shape(name: str, sizes: tuple[int, int, int], n_heads: int, tied: bool) -> KnownShape:
    present = TIED if tied else PRESENT
    return any_shape(name, "qwen3", 151936, sizes, (n_heads, 8, 128), 40960, present=present)


def gemma3_shape(
    name: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], window: int
) -> KnownShape:
    return any_shape(
        name,
        "gemma3",
        262144,
        sizes,
        heads,
        1 << 17,
        present=TIED,
        attention__sliding_window=window,
    )


def gemma4_shape(
    name: str,
    sizes: tuple[int, int, Any],
    heads: tuple[int, Any],
    window: int,
    period: int,
    *,
    per_layer: int = 0,
    shared: int = 0,
    **more: Any,
) -> KnownShape:
    """Heads of 256 channels with a window, of 512 without, in every `period`-th layer."""
    n_layers = sizes[0]
    pattern = [i % period < period - 1 for i in range(n_layers)]
    full = [i for i in range(n_layers) if not pattern[i]]
    # the large ones have no V of their own where they see everything
    tensors = {
        f"blk.{i}.attn_v.weight": (1, 1) for i in range(n_layers) if per_layer or i not in full
    }
    return any_shape(
        name,
        "gemma4",
        262144,
        sizes,
        heads,
        1 << 17,
        present=TIED,
        tensors={
            "rope_freqs.weight": (256,),
            **{f"blk.{i}.layer_output_scale.weight": (1,) for i in range(n_layers)},
            **tensors,
        },
        **{
            "attention.key_length": 512,
            "attention.value_length": 512,
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "rope.dimension_count": 512,
            "rope.dimension_count_swa": 256,
            "attention.sliding_window": window,
            "attention.sliding_window_pattern": pattern,
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": per_layer,
            "final_logit_softcapping": 30.0,
            **more,
        },
    )


def gemma4_heads(n_layers: int, period: int, window: int, full: int) -> list[int]:
    """KV heads of each layer."""
    return [window if i % period < period - 1 else full for i in range(n_layers)]


def qwen35_shape(
    name: str,
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    value_heads: int,
    *,
    architecture: str = "qwen35",
    present: tuple[str, ...] = PRESENT,
    n_vocab: int = 248320,
    **more: Any,
) -> KnownShape:
    """A gated delta net in three layers of four: heads of 128, 16 of them keys'."""
    return any_shape(
        name,
        architecture,
        n_vocab,
        sizes,
        (*heads, 256),
        262144,
        present=present,
        **{
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": value_heads,
            "ssm.inner_size": 128 * value_heads,
            "full_attention_interval": 4,
            **more,
        },
    )


def gpt_oss_shape(name: str, n_layers: int, n_experts: int) -> KnownShape:
    return any_shape(
        name,
        "gpt-oss",
        201088,
        (n_layers, 2880, 0),
        (64, 8, 64),
        1 << 17,
        present=(
            *PRESENT,
            *ATTENTION_BIASES,
            "attn_output.bias",
            "ffn_gate_inp.bias",
            "_exps.bias",
        ),
        **{
            **expert_keys(n_experts, 4, 2880),
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    )


def latent_shape(
    name: str,
    n_vocab: int,
    sizes: tuple[int, int, int],
    n_heads: int,
    n_ctx: int,
    *,
    q_rank: int = 0,
    nope: int = 128,
    value: int = 128,
    **more: Any,
) -> KnownShape:
    """DeepSeek's latent attention: latents of 512, 64 rotated channels."""
    keys: dict[str, Any] = {
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": nope + 64,
        "attention.value_length_mla": value,
        "rope.dimension_count": 64,
        **({"attention.q_lora_rank": q_rank} if q_rank else {}),
        **more,
    }
    tensors: dict[str, tuple[int, ...]] = {}
    for i in range(sizes[0]):
        q = "attn_q_a" if q_rank else "attn_q"
        tensors[f"blk.{i}.{q}.weight"] = (1, 1)
        tensors[f"blk.{i}.attn_k_b.weight"] = (n_heads, 512, nope)
        tensors[f"blk.{i}.attn_v_b.weight"] = (n_heads, value, 512)
    return any_shape(
        name, "deepseek2", n_vocab, sizes, (n_heads, 1), n_ctx, tensors=tensors, **keys
    )


def lfm2_shape(
    name: str, sizes: tuple[int, int, int], n_heads: int, attention: tuple[int, ...]
) -> KnownShape:
    """Attention in the layers `attention`, short convolutions in all others."""
    kv = [8 if i in attention else 0 for i in range(sizes[0])]
    return any_shape(
        name, "lfm2", 65536, sizes, (n_heads, kv), 128000, present=TIED, shortconv__l_cache=3
    )


def granite4_shape(
    name: str, sizes: tuple[int, int, int], heads: tuple[int, int], ssm_heads: int, **more: Any
) -> KnownShape:
    """Attention in every tenth layer, Mamba-2 in all others."""
    kv = [heads[1] if i % 10 == 5 else 0 for i in range(sizes[0])]
    return any_shape(
        name,
        "granitehybrid",
        100352,
        sizes,
        (heads[0], kv),
        131072,
        present=(*TIED, "ssm_conv1d.bias"),
        tensors={"blk.0.ssm_norm.weight": (ssm_heads * 64,)},
        **{
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 1,
            "ssm.time_step_rank": ssm_heads,
            "ssm.inner_size": ssm_heads * 64,
            "rope.scaling.finetuned": False,
            **GRANITE_FACTORS,
            **more,
        },
    )


def nemotron3_shape(name: str, n_embd: int, pattern: str) -> KnownShape:
    """A letter for each layer: Mamba-2 (M), experts (E) or attention (*)."""
    return any_shape(
        name,
        "nemotron_h_moe",
        131072,
        (len(pattern), n_embd, 0),
        (32, [2 * (kind == "*") for kind in pattern], 128),
        1 << 18,
        tensors={"blk.0.ssm_norm.weight": (8, 512)},
        feed_forward_length=[1856 * (kind == "E") for kind in pattern],
        ssm__conv_kernel=4,
        ssm__state_size=128,
        ssm__group_count=8,
        ssm__time_step_rank=64,
        ssm__inner_size=4096,
        expert_weights_norm=True,
        expert_weights_scale=2.5,
        **expert_keys(128, 6, 1856, expert_shared_feed_forward_length=3712),
    )
