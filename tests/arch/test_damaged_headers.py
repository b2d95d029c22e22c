"""Contradictory headers of every architecture: one line, before anything is read or allocated."""

from __future__ import annotations

import random
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from localkv.arch import ARCHS
from localkv.arch.spec import AttentionSpec
from localkv.errors import ModelFileError
from localkv.loader.model_header import model_spec
from localkv.loader.weights import check_tensors
from support.headers import Header, header_of

FEW = ("llama", "gemma2", "granite", "olmo2", "phi3")
every_architecture = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in ARCHS]
)


def refusal(header: Header) -> str:
    """Why a file with this header is refused, in one line; empty if it is not."""
    line = ""
    try:
        check_tensors(header, model_spec(header))
    except ModelFileError as error:
        line = str(error)
    assert "\n" not in line
    return line


def changed(name: str, **keys: object) -> Header:
    """A sound header, with other keys; `__` stands for a dot."""
    header = header_of(name)
    header.keys |= {header.key(key.replace("__", ".")): value for key, value in keys.items()}
    return header


@every_architecture
def test_sound_headers(name: str) -> None:
    assert refusal(header_of(name)) == ""


@every_architecture
def test_missing_keys_and_wrong_types(name: str) -> None:
    """A key that every model needs is named."""
    header = header_of(name)
    for key in map(header.key, ("block_count", "embedding_length", "context_length")):
        assert f"missing key {key!r}" in refusal(_without(header, key))
        for value in ("text", [0.5, 1.5], True):
            assert f"key {key!r} is " in refusal(_with(header, key, value)), value
    epsilons = [key for key in header.keys if key.endswith("_epsilon")]
    line = refusal(_without(header, *epsilons))
    assert any(f"missing key {key!r}" in line for key in epsilons)


@pytest.mark.slow
@every_architecture
def test_no_value_of_a_key_does_harm(name: str) -> None:
    """Whatever a key holds, there is a specification or one line."""
    header = header_of(name)
    for key in header.keys:
        for value in ("text", 7, 0, -1, 1 << 40, float("nan"), [], [1], [True, False], ["a"]):
            _try_spec(_with(header, key, value))
        _try_spec(_without(header, key))


@pytest.mark.slow
@every_architecture
def test_no_size_is_used_before_a_tensor_has_it(name: str) -> None:
    """A number of a key costs neither memory nor time, however large."""
    header = header_of(name)
    refusal(header)  # imports what it needs
    for key in [key for key, value in header.keys.items() if type(value) is int]:
        for value in (1 << 12, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 32, (1 << 63) - 1):
            tracemalloc.start()
            started = time.process_time()
            refusal(_with(header, key, value))
            took, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 23, f"{key} = {value}: {peak >> 20} MiB"
            assert took < 1, f"{key} = {value}: {took:.1f} s"


@pytest.mark.parametrize("blocks", [3, 4096])
def test_layers_that_no_tensor_has(blocks: int) -> None:
    line = refusal(changed("llama", block_count=blocks))
    assert line == f"key 'llama.block_count' is {blocks}, but llama.gguf has tensors of 2 blocks"


@every_architecture
def test_heads_that_do_not_divide(name: str) -> None:
    header = header_of(name)
    mixers = [layer.mixer for layer in header.spec().layers]
    if not isinstance(mixers[0], AttentionSpec):
        pytest.skip("its first layer has no heads of K and V")
    header.keys |= {header.key("attention.head_count"): 7, header.key("attention.head_count_kv"): 2}
    assert "7 heads can't share 2 KV heads evenly" in refusal(header)


@every_architecture
def test_window_patterns_of_another_length(name: str) -> None:
    mixers = [layer.mixer for layer in header_of(name).spec().layers]
    params = [getattr(getattr(mixer, "attention", mixer), "params", None) for mixer in mixers]
    windows = {p.window for p in params if p is not None}
    if len(windows) == 1:
        pytest.skip("either no layer has a window here, or each has")
    header = changed(name, attention__sliding_window_pattern=[True])
    assert f"has 1 items for {len(params)} layers" in refusal(header)


@every_architecture
def test_unknown_scaling_of_rope(name: str) -> None:
    if not header_of(name).spec().ropes:
        pytest.skip("it has no RoPE")
    assert "'spiral' is not supported" in refusal(changed(name, rope__scaling__type="spiral"))


CLAMPING = ("dbrx", "mpt", "olmo")
BIASED = ("jais", "mpt")


@every_architecture
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.causal", False),
        ("nextn_predict_layers", 1 << 15),
    ],
)
def test_what_no_architecture_does(name: str, key: str, value: Any) -> None:
    header = header_of(name)
    if key == "attention.causal":
        value = header.spec().is_encoder
    if key == "attention.clamp_kqv" and name in CLAMPING:
        assert _with(header, header.key(key), value).spec().layers[0].attention.clamp == value
        return
    if key == "attention.max_alibi_bias" and name in BIASED:
        assert _with(header, header.key(key), value).spec().layers[0].attention.params.alibi == 8.0
        return
    assert refusal(_with(header, header.key(key), value)) != ""
    if value == 8.0:
        assert refusal(_with(header, header.key(key), 0.0)) == ""


@every_architecture
def test_missing_and_misshapen_tensors(name: str) -> None:
    header = header_of(name)
    needed = [n for n in header.shapes if n.endswith((".attn_output.weight", "token_embd.weight"))]
    for tensor in (*needed[:1], *random.Random(0).sample(needed, min(3, len(needed)))):
        shapes = dict(header.shapes)
        del shapes[tensor]
        assert f"missing tensor {tensor!r}" in refusal(Header(name, header.keys, shapes))
        shapes[tensor] = (*header.shapes[tensor][:-1], header.shapes[tensor][-1] + 32)
        line = refusal(Header(name, header.keys, shapes))
        assert "has shape" in line, line


def test_encoders_of_images_are_refused_by_name() -> None:
    header = Header("clip", {}, {"v.patch_embd.weight": (3, 3)})
    assert refusal(header).startswith("clip.gguf is an encoder of images or sound (mmproj), which")


@pytest.mark.parametrize("name", ["gemma4-assistant", "eagle3", "dflash"])
def test_blocks_that_guess_for_another_model_are_refused_by_name(name: str) -> None:
    line = refusal(Header(name, {}, {"token_embd.weight": (8, 32)}))
    assert line.startswith(
        f"{name}.gguf is a block that guesses from another model's hidden states"
    )


def _try_spec(header: Header) -> None:
    with suppress(ModelFileError):
        header.spec()


def _with(header: Header, key: str, value: object) -> Header:
    return Header(header.architecture, {**header.keys, key: value}, header.shapes)


def _without(header: Header, *names: str) -> Header:
    keys = {key: value for key, value in header.keys.items() if key not in names}
    return Header(header.architecture, keys, header.shapes)


def test_a_scale_of_a_whole_matrix() -> None:
    """NVFP4's files may have them; nothing else would say that they are missing in the product."""
    header = header_of("llama")
    assert refusal(header) == ""
    header.shapes["blk.0.attn_q.scale"] = (1,)
    assert "'blk.0.attn_q.scale' scales a whole matrix" in refusal(header)
