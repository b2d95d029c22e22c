"""Facts of well-known models: what their files say of layers, widths and experts.

After the models' published configurations. A shape holds what its family (`arch/`) asks for; what
only matters to text or to accuracy (norms' epsilons, RoPE's bases) has one plausible value.
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


def _shape(
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


def _experts(n: int, used: int, n_ff: int, **more: Any) -> dict[str, Any]:
    """Keys of routed experts: how many, used, width of one."""
    keys = {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": n_ff}
    return {**keys, **more}


def _llama(name: str, sizes: tuple[int, int, int], n_heads: int, **more: Any) -> KnownShape:
    """A Llama 3 model: 8 KV heads, 128k tokens of context."""
    return _shape(name, "llama", 128256, sizes, (n_heads, 8), 1 << 17, **more)


def _qwen3(name: str, sizes: tuple[int, int, int], n_heads: int, tied: bool) -> KnownShape:
    present = TIED if tied else PRESENT
    return _shape(name, "qwen3", 151936, sizes, (n_heads, 8, 128), 40960, present=present)


def _gemma3(
    name: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], window: int
) -> KnownShape:
    return _shape(
        name,
        "gemma3",
        262144,
        sizes,
        heads,
        1 << 17,
        present=TIED,
        attention__sliding_window=window,
    )


def _gemma4(
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
    return _shape(
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


def _gemma4_heads(n_layers: int, period: int, window: int, full: int) -> list[int]:
    """KV heads of each layer."""
    return [window if i % period < period - 1 else full for i in range(n_layers)]


def _qwen35(
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
    return _shape(
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


def _gpt_oss(name: str, n_layers: int, n_experts: int) -> KnownShape:
    return _shape(
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
            **_experts(n_experts, 4, 2880),
            "attention.sliding_window": 128,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        },
    )


def _latent(
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
    return _shape(name, "deepseek2", n_vocab, sizes, (n_heads, 1), n_ctx, tensors=tensors, **keys)


def _lfm2(
    name: str, sizes: tuple[int, int, int], n_heads: int, attention: tuple[int, ...]
) -> KnownShape:
    """Attention in the layers `attention`, short convolutions in all others."""
    kv = [8 if i in attention else 0 for i in range(sizes[0])]
    return _shape(
        name, "lfm2", 65536, sizes, (n_heads, kv), 128000, present=TIED, shortconv__l_cache=3
    )


def _granite4(
    name: str, sizes: tuple[int, int, int], heads: tuple[int, int], ssm_heads: int, **more: Any
) -> KnownShape:
    """Attention in every tenth layer, Mamba-2 in all others."""
    kv = [heads[1] if i % 10 == 5 else 0 for i in range(sizes[0])]
    return _shape(
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
            **_GRANITE,
            **more,
        },
    )


_PHI_LONG: dict[str, Any] = {
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.attn_factor": 1.19,
}
_GRANITE: dict[str, Any] = {
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "attention.scale": 0.0078125,
    "logit_scale": 16.0,
}
_LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)

KNOWN_SHAPES: dict[str, KnownShape] = {
    shape.name: shape
    for shape in (
        _shape("llama-tiny", "llama", 512, (2, 512, 1024), (16, 8), 1 << 17),
        _llama("llama-1b", (16, 2048, 8192), 32),
        _llama("llama-3b", (28, 3072, 8192), 24),
        _llama("llama-8b", (32, 4096, 14336), 32),
        _llama("llama-70b", (80, 8192, 28672), 64),
        _shape("mistral-7b", "llama", 32768, (32, 4096, 14336), (32, 8, 128), 32768),
        _shape(
            "mixtral-8x7b",
            "llama",
            32000,
            (32, 4096, 14336),
            (32, 8, 128),
            32768,
            expert_count=8,
            expert_used_count=2,
        ),
        _shape("mistral-small-24b", "llama", 131072, (40, 5120, 32768), (32, 8, 128), 1 << 17),
        _shape("smollm3-3b", "smollm3", 128256, (36, 2048, 11008), (16, 4), 65536, present=TIED),
        _qwen3("qwen3-0.6b", (28, 1024, 3072), 16, True),
        _qwen3("qwen3-1.7b", (28, 2048, 6144), 16, True),
        _qwen3("qwen3-4b", (36, 2560, 9728), 32, True),
        _qwen3("qwen3-8b", (36, 4096, 12288), 32, False),
        _qwen3("qwen3-14b", (40, 5120, 17408), 40, False),
        _qwen3("qwen3-32b", (64, 5120, 25600), 64, False),
        _shape("moe-tiny", "qwen3moe", 512, (2, 256, 0), (8, 4, 128), 40960, **_experts(8, 2, 256)),
        _shape(
            "qwen3-30b-a3b",
            "qwen3moe",
            151936,
            (48, 2048, 0),
            (32, 4, 128),
            40960,
            **_experts(128, 8, 768),
        ),
        _gemma3("gemma3-1b", (26, 1152, 6912), (4, 1, 256), 512),
        _gemma3("gemma3-4b", (34, 2560, 10240), (8, 4, 256), 1024),
        _gemma3("gemma3-12b", (48, 3840, 15360), (16, 8, 256), 1024),
        _gemma3("gemma3-27b", (62, 5376, 21504), (32, 16, 128), 1024),
        _gemma4(
            "gemma4-e2b",
            (35, 1536, [6144] * 15 + [12288] * 20),
            (8, 1),
            512,
            5,
            per_layer=256,
            shared=20,
        ),
        _gemma4("gemma4-e4b", (42, 2560, 10240), (8, 2), 512, 6, per_layer=256, shared=18),
        _gemma4(
            "gemma4-26b-a4b",
            (30, 2816, 2112),
            (16, _gemma4_heads(30, 6, 8, 2)),
            1024,
            6,
            **_experts(128, 8, 704),
        ),
        _gemma4("gemma4-31b", (60, 5376, 21504), (32, _gemma4_heads(60, 6, 16, 4)), 1024, 6),
        _qwen35("qwen35-0.8b", (24, 1024, 3584), (8, 2), 16, present=TIED),
        _qwen35("qwen35-2b", (24, 2048, 6144), (8, 2), 16, present=TIED),
        _qwen35("qwen35-4b", (32, 2560, 9216), (16, 4), 32, present=TIED),
        _qwen35("qwen35-9b", (32, 4096, 12288), (16, 4), 32),
        _qwen35("qwen35-27b", (64, 5120, 17408), (24, 4), 48),
        _qwen35(
            "qwen35-35b-a3b",
            (40, 2048, 0),
            (16, 2),
            32,
            architecture="qwen35moe",
            **_experts(256, 8, 512, expert_shared_feed_forward_length=512),
        ),
        _qwen35(
            "qwen3-next-80b-a3b",
            (48, 2048, 0),
            (16, 2),
            32,
            architecture="qwen3next",
            n_vocab=151936,
            **_experts(512, 10, 512, expert_shared_feed_forward_length=512),
        ),
        _gpt_oss("gpt-oss-20b", 24, 32),
        _gpt_oss("gpt-oss-120b", 36, 128),
        _latent(
            "deepseek-v2-lite",
            102400,
            (27, 2048, 10944),
            16,
            163840,
            leading_dense_block_count=1,
            expert_shared_count=2,
            **_experts(64, 6, 1408),
        ),
        _latent(
            "deepseek-v3",
            129280,
            (61, 7168, 18432),
            128,
            163840,
            q_rank=1536,
            leading_dense_block_count=3,
            expert_shared_count=1,
            expert_gating_func=2,
            expert_group_count=8,
            expert_group_used_count=4,
            expert_weights_scale=2.5,
            expert_weights_norm=True,
            **_experts(256, 8, 2048),
        ),
        _latent(
            "glm-4.7-flash",
            154880,
            (47, 2048, 10240),
            20,
            202752,
            q_rank=768,
            nope=192,
            value=256,
            leading_dense_block_count=1,
            expert_shared_count=1,
            expert_gating_func=2,
            expert_weights_scale=1.8,
            expert_weights_norm=True,
            **_experts(64, 4, 1536),
        ),
        _shape(
            "glm-4-9b",
            "glm4",
            151552,
            (40, 4096, 13696),
            (32, 2, 128),
            131072,
            present=("output.weight", *ATTENTION_BIASES),
            rope__dimension_count=64,
        ),
        _shape(
            "glm-4.5-air",
            "glm4moe",
            151552,
            (46, 4096, 10944),
            (96, 8, 128),
            131072,
            rope__dimension_count=64,
            leading_dense_block_count=1,
            expert_shared_count=1,
            expert_gating_func=2,
            expert_weights_norm=True,
            **_experts(128, 8, 1408),
        ),
        _lfm2("lfm2-350m", (16, 1024, 4608), 16, _LFM2_ATTENTION),
        _lfm2("lfm2-1.2b", (16, 2048, 8192), 32, _LFM2_ATTENTION),
        _lfm2("lfm2-2.6b", (30, 2048, 10752), 32, (2, 5, 9, 13, 17, 21, 24, 27)),
        _shape(
            "phi-4",
            "phi3",
            100352,
            (40, 5120, 17920),
            (40, 10, 128),
            16384,
            present=("output.weight", "attn_qkv.weight"),
        ),
        _shape(
            "phi-4-mini",
            "phi3",
            200064,
            (32, 3072, 8192),
            (24, 8, 128),
            131072,
            present=("attn_qkv.weight",),
            tensors={
                "rope_factors_long.weight": (48,),
                "rope_factors_short.weight": (48,),
            },
            rope__dimension_count=96,
            **_PHI_LONG,
        ),
        _shape(
            "granite-3.3-2b",
            "granite",
            49159,
            (40, 2048, 8192),
            (32, 8, 64),
            131072,
            present=TIED,
            **_GRANITE,
        ),
        _shape(
            "granite-3.3-8b",
            "granite",
            49159,
            (40, 4096, 12800),
            (32, 8, 128),
            131072,
            present=TIED,
            **_GRANITE,
        ),
        _shape(
            "granite-4-micro",
            "granite",
            100352,
            (40, 2560, 8192),
            (40, 8, 64),
            131072,
            present=TIED,
            **_GRANITE,
        ),
        _granite4("granite-4-h-micro", (40, 2048, 8192), (32, 8), 64),
        _granite4(
            "granite-4-h-tiny",
            (40, 1536, 512),
            (12, 4),
            48,
            expert_count=64,
            expert_used_count=6,
            expert_shared_feed_forward_length=1024,
        ),
        _shape(
            "olmo3-7b",
            "olmo2",
            100278,
            (32, 4096, 11008),
            (32, 32),
            65536,
            attention__sliding_window=4096,
        ),
        _shape(
            "olmo3-32b",
            "olmo2",
            100278,
            (64, 5120, 27648),
            (40, 8),
            65536,
            attention__sliding_window=4096,
        ),
        _shape(
            "command-r7b",
            "cohere2",
            256000,
            (32, 4096, 14336),
            (32, 8),
            131072,
            present=TIED,
            attention__sliding_window=4096,
            logit_scale=0.25,
        ),
        _shape(
            "exaone4-32b",
            "exaone4",
            102400,
            (64, 5120, 27392),
            (40, 8, 128),
            131072,
            attention__sliding_window=4096,
        ),
        _shape(
            "seed-oss-36b",
            "seed_oss",
            155136,
            (64, 5120, 27648),
            (80, 8, 128),
            524288,
            present=(*PRESENT, *ATTENTION_BIASES),
        ),
        _shape(
            "minimax-m2",
            "minimax-m2",
            200064,
            (62, 3072, 1536),
            (48, 8, 128),
            196608,
            rope__dimension_count=64,
            expert_gating_func=2,
            **_experts(256, 8, 1536),
        ),
        _shape(
            "llama4-scout",
            "llama4",
            202048,
            (48, 5120, 16384),
            (40, 8, 128),
            10485760,
            interleave_moe_layer_step=1,
            expert_gating_func=2,
            **_experts(16, 1, 8192),
        ),
    )
}
"""By name; the tiny ones take no time."""
