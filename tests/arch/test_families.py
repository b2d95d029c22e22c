"""Facts of families that a small random file doesn't have."""

from __future__ import annotations

import math
from importlib import import_module
from types import FunctionType

import pytest

from localkv.arch import ARCHS, FAMILIES
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec, NormSpec
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
    "attention.layer_norm_epsilon": 1e-6,
}


def spec_of(name: str, **keys: object) -> ModelSpec:
    """The specification of a file with these keys; `__` stands for a dot."""
    values = {**KEYS, **{key.replace("__", "."): value for key, value in keys.items()}}
    metadata = Metadata({f"{name}.{key}": value for key, value in values.items()})
    return ARCHS[name](Facts(name, "", metadata, {"token_embd.weight": (50, 96)}))


def windows(spec: ModelSpec) -> list[int]:
    return [layer.attention.params.window for layer in spec.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_functions_that_the_table_names(family: str) -> None:
    module = vars(import_module(f"localkv.arch.{family}"))
    assert {type(module.get(name)) for name in FAMILIES[family].values()} == {FunctionType}


def test_gemma3_has_windows_in_five_layers_of_six() -> None:
    spec = spec_of("gemma3", block_count=8, attention__sliding_window=64)
    assert windows(spec) == [64] * 5 + [0] + [64] * 2
    assert [group.layers for group in spec.groups] == [(0, 1, 2, 3, 4, 6, 7), (5,)]
    assert spec.embedding_scale == math.sqrt(96)


def test_gemma3_reads_its_pattern_of_windows() -> None:
    pattern = [True, False, True, True, False, False]
    keys = {"attention__sliding_window": 8, "attention__sliding_window_pattern": pattern}
    assert windows(spec_of("gemma3", **keys)) == [8, 0, 8, 8, 0, 0]
    with pytest.raises(ModelFileError, match="has 2 items for 6 layers"):
        spec_of("gemma3", **{**keys, "attention__sliding_window_pattern": pattern[:2]})


def test_gemma3_rotates_layers_with_a_window_by_a_base_of_their_own() -> None:
    keys = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    spec = spec_of("gemma3", attention__sliding_window=64, **keys)
    thetas = [(rope.theta, rope.factor) for rope in spec.ropes]
    assert thetas == [(10000.0, 1.0), (1e6, 8.0)]
    other = spec_of("gemma3", attention__sliding_window=64, rope__freq_base_swa=500.0)
    assert other.ropes[0].theta == 500.0


def test_the_largest_gemma3_scales_queries_by_the_embedding() -> None:
    for n_layers, channels in ((61, 32), (62, 24)):
        spec = spec_of("gemma3", block_count=n_layers)
        assert spec.layers[0].attention.params.softmax_scale == 1 / math.sqrt(channels)


def test_command_r_plus_norms_each_head_of_q_and_k() -> None:
    spec = spec_of("command-r", logit_scale=0.25)
    assert (spec.logit_scale, len(spec.kinds), spec.kinds[0].parallel) == (0.25, 1, True)
    assert spec.layers[0].attention.q_norm is None
    plus = spec_of("command-r", logit_scale=0.25, block_count=64).layers[0].attention
    assert plus.q_norm == NormSpec("attn_q_norm", "layer", 1e-6, "heads")
    assert plus.k_norm == NormSpec("attn_k_norm", "layer", 1e-6, "heads")


def test_layers_without_rope_are_of_another_kind_but_of_one_group() -> None:
    spec = spec_of("smollm3", block_count=8)
    assert [layer.attention.rope is None for layer in spec.layers] == [
        False,
        False,
        False,
        True,
    ] * 2
    assert len(spec.kinds) == 2
    assert len(spec.groups) == 1
