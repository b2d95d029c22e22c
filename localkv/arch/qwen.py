"""Qwen 1 to 3, dense and with experts, and Qwen3-Next and Qwen 3.5.

The last two have a gated delta rule in three layers of four, and gated attention in the other.
After llama.cpp's `src/models/qwen2.cpp` and its kin, `qwen3next.cpp`, `qwen35.cpp` and
`qwen35moe.cpp`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from localkv.arch import plain
from localkv.arch.checkpoint import (
    Checkpoint,
    Config,
    Keys,
    Named,
    Weight,
    moe_keys,
    rope_dimensions,
    with_split_experts,
)
from localkv.arch.experts import expert_width, experts
from localkv.arch.facts import Facts
from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
)
from localkv.errors import ModelFileError


def _model(facts: Facts, attention: AttentionSpec, ffn: MlpSpec | MoeSpec) -> ModelSpec:
    return plain.model(facts, plain.layer(facts, attention, ffn))


def _biased(facts: Facts) -> AttentionSpec:
    return replace(plain.attention(facts, interleaved=False), qkv_bias=True)


def _normed(facts: Facts) -> AttentionSpec:
    return replace(plain.attention(facts, interleaved=False), **plain.head_norms(facts))


def qwen(facts: Facts) -> ModelSpec:
    """The first Qwen; its files give the width of gate and up together."""
    mlp = plain.mlp(facts)
    return _model(facts, _biased(facts), replace(mlp, n_ff=mlp.n_ff // 2))


def qwen2(facts: Facts) -> ModelSpec:
    return _model(facts, _biased(facts), plain.mlp(facts))


def qwen2moe(facts: Facts) -> ModelSpec:
    """A shared expert, gated by a sigmoid; weights of routed ones as the softmax leaves them."""
    n_ff = facts.same_in_all_layers("feed_forward_length", 0)
    n_shared = facts.integer("expert_shared_feed_forward_length", n_ff)
    moe = experts(facts, renormalise=False, n_ff_shared=n_shared, shared_gated=True)
    return _model(facts, _biased(facts), moe)


def qwen3(facts: Facts) -> ModelSpec:
    """A file may have a head with a class for yes and one for no (Qwen 3 Reranker)."""
    spec = _model(facts, _normed(facts), plain.mlp(facts))
    return replace(spec, classifier=plain.classifier(facts, "last", is_softmax=True))


def qwen3moe(facts: Facts) -> ModelSpec:
    return _model(facts, _normed(facts), experts(facts))


def qwen2vl(facts: Facts) -> ModelSpec:
    """The part that reads text, of Qwen2-VL and Qwen2.5-VL."""
    facts.turns_sections()
    return qwen2(facts)


def qwen3vl(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return qwen3(facts)


def qwen3vlmoe(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return qwen3moe(facts)


ATTENDING_INTERVAL = 4
"""Every fourth layer attends, if the file does not say otherwise."""


def recurrent_layers(facts: Facts) -> tuple[bool, ...]:
    """Whether each layer is recurrent."""
    if facts.has("attention.recurrent_layers"):
        return facts.flags_per_layer("attention.recurrent_layers")
    interval = facts.integer("full_attention_interval", ATTENDING_INTERVAL)
    return tuple((i + 1) % interval != 0 for i in range(facts.n_layers))


def delta_net(facts: Facts, *, heads_in_turn: bool) -> DeltaNetSpec:
    """The mixer of the recurrent layers.

    Raises:
        ModelFileError: the sizes contradict each other.
    """
    size, n_values = facts.integer("ssm.state_size"), facts.integer("ssm.time_step_rank")
    n_keys, width = facts.integer("ssm.group_count"), facts.integer("ssm.inner_size")
    if n_values * size != width:
        raise ModelFileError(f"{n_values} heads of {size} channels are not {width} channels")
    if n_values % n_keys:
        raise ModelFileError(f"{n_values} value heads can't share {n_keys} key heads evenly")
    eps = facts.number("attention.layer_norm_rms_epsilon")
    return DeltaNetSpec(
        n_key_heads=n_keys,
        n_value_heads=n_values,
        head_dim=size,
        conv_kernel=facts.integer("ssm.conv_kernel"),
        norm=NormSpec("ssm_norm", "rms", eps),
        heads_in_turn=heads_in_turn,
    )


def _hybrid(facts: Facts, ffn: MlpSpec | MoeSpec, *, heads_in_turn: bool) -> ModelSpec:
    attention = plain.attention(facts, interleaved=False)
    attention = replace(attention, gated=True, **plain.head_norms(facts))
    net = delta_net(facts, heads_in_turn=heads_in_turn)
    norms = facts.rms_norm("attn_norm"), facts.rms_norm("post_attention_norm")
    attending, recurrent = (LayerSpec(mixer, ffn, *norms) for mixer in (attention, net))
    flags = recurrent_layers(facts)
    if all(flags):
        raise ModelFileError("a model of recurrent layers only is not supported")
    layers = [recurrent if flag else attending for flag in flags]
    return plain.model(facts, layers, prediction=facts.prediction(attending))


def _gated_experts(facts: Facts) -> MoeSpec:
    """Routed experts, and a shared one that is gated by a sigmoid."""
    n_shared = facts.integer("expert_shared_feed_forward_length", expert_width(facts))
    return experts(facts, n_ff_shared=n_shared, shared_gated=True)


def qwen35(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return _hybrid(facts, plain.mlp(facts), heads_in_turn=True)


def qwen35moe(facts: Facts) -> ModelSpec:
    facts.turns_sections()
    return _hybrid(facts, _gated_experts(facts), heads_in_turn=True)


def qwen3next(facts: Facts) -> ModelSpec:
    return _hybrid(facts, _gated_experts(facts), heads_in_turn=False)


def _moe_keys(config: Config) -> Keys:
    """The softmax of the experts is normed, or not, by the architecture."""
    keys = moe_keys(config)
    keys.pop("expert_weights_norm", None)
    return keys


def _checked_keys(config: Config, *, normed: bool) -> Keys:
    """Keys of an architecture that norms the weights of a token's experts, or doesn't.

    Raises:
        ModelFileError: the checkpoint wants the other.
    """
    if config.flag("norm_topk_prob", default=normed) != normed:
        value = str(not normed).lower()
        raise ModelFileError(f"config.json: norm_topk_prob is {value}, which files can't say")
    return _moe_keys(config)


def _hybrid_keys(config: Config) -> Keys:
    """Qwen3-Next's and Qwen 3.5's; a quarter of a head's channels rotates."""
    n_values = config.integer("linear_num_value_heads")
    keys = _moe_keys(config) | {
        "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
        "ssm.state_size": config.integer("linear_key_head_dim"),
        "ssm.group_count": config.integer("linear_num_key_heads"),
        "ssm.time_step_rank": n_values,
        "ssm.inner_size": config.integer("linear_value_head_dim") * n_values,
        "full_attention_interval": config.integer(
            "full_attention_interval", default=ATTENDING_INTERVAL
        ),
        "rope.dimension_count": rope_dimensions(config, 0.25),
    }
    if config.has("layer_types"):
        recurrent = [kind == "linear_attention" for kind in config.layer_types]
        keys["attention.recurrent_layers"] = recurrent + [False] * config.n_predicting
    return keys


SECTIONS = [11, 11, 10, 0]
"""Pairs of channels of Qwen 3.5 that turn by time, height and width."""


def _qwen35_keys(config: Config) -> Keys:
    return {"rope.dimension_sections": SECTIONS, **_hybrid_keys(config)}


_PREDICTING = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}


def _of_layers(config: Config, name: str) -> str:
    """A tensor's name, where the block that predicts is one after the layers."""
    name = name.removeprefix("model.") if name.startswith("model.mtp.") else name
    parts = name.split(".", 3)
    if parts[:2] == ["mtp", "layers"] and len(parts) == 4 and parts[2].isdecimal():
        return f"model.layers.{config.n_layers + int(parts[2])}.{parts[3]}"
    if parts[0] == "mtp" and len(parts) == 3 and parts[1] in _PREDICTING:
        return f"model.layers.{config.n_layers}.{_PREDICTING[parts[1]]}.{parts[2]}"
    return name


def _hybrid_weights(config: Config, name: str, weight: Weight) -> Named:
    """Decays as they are used, norms with their 1, and q, k and v of all heads side by side."""
    name = _of_layers(config, name)
    if name.endswith(".A_log"):
        weight = weight.as_decay()
    elif name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    elif ".conv1d." in name:
        weight = weight.reshaped((weight.shape[0], weight.shape[-1]))
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        weight = weight.plus(1.0)
    if not name.endswith(".in_proj_qkvz.weight"):
        yield from with_split_experts(config, name, weight)
        return
    size, value_size = (
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
    )
    n_keys = config.integer("linear_num_key_heads")
    width = config.integer("linear_num_value_heads") // n_keys * value_size
    sizes = (size, size, width, width)
    parts: list[list[int]] = [[], [], [], []]
    for head in range(n_keys):
        start = head * sum(sizes)
        for part, n in zip(parts, sizes, strict=True):
            part += range(start, start + n)
            start += n
    base = name.removesuffix("in_proj_qkvz.weight")
    yield f"{base}in_proj_qkv.weight", weight.rows(parts[0] + parts[1] + parts[2])
    yield f"{base}in_proj_z.weight", weight.rows(parts[3])


def _in_turn(config: Config, size: int, offset: int = 0) -> list[int]:
    """The order in which value heads stand whose key heads are 0, 1, ..., 0, 1, ...: checkpoints
    have all heads of a key head together. What is before `offset` stays."""
    n_keys = config.integer("linear_num_key_heads")
    n_each = config.integer("linear_num_value_heads") // n_keys
    heads = [key * n_each + i for i in range(n_each) for key in range(n_keys)]
    return [*range(offset), *(offset + head * size + i for head in heads for i in range(size))]


def _qwen35_weights(config: Config, name: str, weight: Weight) -> Named:
    """Value heads in the order of `_in_turn`."""
    if "linear_attn." in name:
        size = config.integer("linear_value_head_dim")
        n_qk = 2 * config.integer("linear_key_head_dim") * config.integer("linear_num_key_heads")
        part = name.partition("linear_attn.")[2]
        if part.startswith(("in_proj_qkv.", "conv1d.")):
            weight = weight.reshaped((weight.shape[0], weight.shape[-1]))
            weight = weight.rows(_in_turn(config, size, n_qk))
        elif part.startswith("in_proj_z."):
            weight = weight.rows(_in_turn(config, size))
        elif part.startswith(("in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
            weight = weight.rows(_in_turn(config, 1))
        elif part.startswith("out_proj."):
            weight = weight.columns(_in_turn(config, size))
    yield from _hybrid_weights(config, name, weight)


CHECKPOINTS = {
    "Qwen2ForCausalLM": Checkpoint("qwen2"),
    "Qwen2MoeForCausalLM": Checkpoint(
        "qwen2moe", keys=partial(_checked_keys, normed=False), weights=with_split_experts
    ),
    "Qwen3ForCausalLM": Checkpoint("qwen3"),
    "Qwen3MoeForCausalLM": Checkpoint(
        "qwen3moe", keys=partial(_checked_keys, normed=True), weights=with_split_experts
    ),
    "Qwen3NextForCausalLM": Checkpoint(
        "qwen3next", keys=_hybrid_keys, weights=_hybrid_weights, predicts=True
    ),
    **{
        f"Qwen3_5{kind}For{task}": Checkpoint(
            f"qwen35{kind.lower()}", keys=_qwen35_keys, weights=_qwen35_weights, predicts=True
        )
        for kind in ("", "Moe")
        for task in ("CausalLM", "ConditionalGeneration")
    },
}
