"""Experts as keys describe them, and keys that contradict each other."""

from __future__ import annotations

import pytest

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec
from localkv.errors import ModelFileError
from localkv.loader.metadata import Metadata

KEYS = {
    "block_count": 6,
    "context_length": 1024,
    "embedding_length": 96,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "expert_count": 8,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_gating_func": 2,
    "interleave_moe_layer_step": 1,
    "logit_scale": 0.5,
}
UNGATED = {**KEYS, "expert_gating_func": 0}


def spec_of(name: str, keys: dict[str, object], *tensors: str) -> ModelSpec:
    metadata = Metadata({f"{name}.{key}": value for key, value in keys.items()})
    shapes = {"token_embd.weight": (50, 96), **dict.fromkeys(tensors, (8,))}
    return ARCHS[name](Facts(name, "", metadata, shapes))


def dense_layers(spec: ModelSpec) -> list[int]:
    return [i for i, layer in enumerate(spec.layers) if layer.moe is None]


def test_leading_layers_and_every_other_one_are_dense() -> None:
    lead = {**KEYS, "leading_dense_block_count": 2}
    assert dense_layers(spec_of("dots1", lead)) == [0, 1]
    step = {**UNGATED, "leading_dense_block_count": 2, "interleave_moe_layer_step": 3}
    assert dense_layers(spec_of("ernie4_5-moe", step)) == [0, 1, 3, 4]
    assert dense_layers(spec_of("llama4", {**UNGATED, "interleave_moe_layer_step": 2})) == [0, 2, 4]
    routers = [f"blk.{i}.ffn_gate_inp.weight" for i in range(1, 6)]
    assert dense_layers(spec_of("hy_v3", KEYS, *routers)) == [0]


def test_blocks_that_predict_are_no_layers() -> None:
    spec = spec_of("glm4moe", {**KEYS, "nextn_predict_layers": 2})
    assert spec.n_layers == 4
    assert spec.ignored_tensors == ("blk.4.", "blk.5.")


def test_layers_of_nemotron_have_experts_of_their_own_number_and_width() -> None:
    keys = {
        **KEYS,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 96,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 3,
        "ssm.group_count": 1,
        "attention.head_count_kv": [0, 0, 2, 0, 0, 0],
        "feed_forward_length": [0, 96, 0, 0, 96, 0],
        "expert_used_count": [0, 2, 0, 0, 3, 0],
        "expert_feed_forward_length": [0, 48, 0, 0, 0, 0],
        "expert_shared_feed_forward_length": 64,
    }
    moes = [layer.moe for layer in spec_of("nemotron_h_moe", keys).layers if layer.moe]
    assert [(moe.n_experts_used, moe.n_ff) for moe in moes] == [(2, 48), (3, 32)]
    with pytest.raises(ModelFileError, match="0 of 8 experts can't be used"):
        spec_of("nemotron_h_moe", {**keys, "expert_used_count": 0})


def test_a_file_has_a_selection_bias_or_not() -> None:
    for name, tensor in (("dots1", "exp_probs_b.bias"), ("hy_v3", "exp_probs_b")):
        routers = [f"blk.{i}.ffn_gate_inp.weight" for i in range(6)]
        for bias in ((), (f"blk.1.{tensor}",)):
            moe = spec_of(name, KEYS, *routers, *bias).layers[-1].moe
            assert moe is not None
            assert moe.selection_bias == bool(bias)


def test_llama4_rotates_three_layers_of_four_in_chunks() -> None:
    spec = spec_of("llama4", {**UNGATED, "block_count": 8})
    chunks = [layer.attention.params.chunk for layer in spec.layers]
    assert chunks == [8192, 8192, 8192, 0] * 2
    for i, layer in enumerate(spec.layers):
        attention, sees_all = layer.attention, i % 4 == 3
        assert (attention.rope is None) == sees_all
        assert (attention.temperature is not None) == sees_all
        assert (attention.q_norm is None) == sees_all
    maverick = spec_of("llama4", {**UNGATED, "expert_count": 128})
    assert maverick.layers[0].attention.q_norm is None


def test_smallthinker_has_windows_and_unrotated_layers_or_neither() -> None:
    spec = spec_of("smallthinker", {**KEYS, "attention.sliding_window": 64})
    assert [x.attention.params.window for x in spec.layers] == [0, 4096, 4096, 4096, 0, 4096]
    assert [x.attention.rope is None for x in spec.layers] == [True, *[False] * 3, True, False]
    plain = spec_of("smallthinker", KEYS)
    assert len(plain.kinds) == 1
    assert plain.layers[0].attention.rope is not None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm4moe", {"expert_gating_func": 9}, "gating function 9 is not supported in 'glm4moe'"),
        ("gpt-oss", {"expert_gating_func": 2}, "gating function 2 is not supported in 'gpt-oss'"),
        ("minimax-m2", {"expert_gating_func": 0}, "gating function 0"),
        ("dots1", {"expert_used_count": 9}, "9 of 8 experts can't be used"),
        ("bailingmoe2", {"expert_group_count": 3}, "8 experts don't make 3 groups"),
        ("bailingmoe2", {"expert_group_count": 8}, "8 experts don't make 8 groups"),
        (
            "bailingmoe2",
            {"expert_group_count": 4, "expert_group_used_count": 5},
            "5 of 4 groups of experts can't be used",
        ),
        (
            "bailingmoe2",
            {"expert_group_count": 4, "expert_group_used_count": 1, "expert_used_count": 3},
            "1 groups of experts have fewer than 3",
        ),
        ("glm4moe", {"nextn_predict_layers": 6}, "none of 6 blocks is a layer"),
        ("ernie4_5-moe", {"expert_used_count": [2, 2, 2, 3, 2, 2]}, "differs between layers"),
        ("dots1", {"expert_weights_scale": 1e9}, "expert_weights_scale"),
        ("dots1", {"expert_shared_count": None}, "expert_shared_count"),
        ("exaone-moe", {"attention.sliding_window": None}, "attention.sliding_window"),
    ],
)
def test_contradictions(name: str, changes: dict[str, object], message: str) -> None:
    base = UNGATED if name in ("gpt-oss", "ernie4_5-moe") else KEYS
    keys = {key: value for key, value in {**base, **changes}.items() if value is not None}
    with pytest.raises(ModelFileError, match=message) as error:
        spec_of(name, keys)
    assert "\n" not in str(error.value)
