"""A profile's file: there and back, damage in every part, other models' and older files."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.arch.spec import CacheGroup
from localkv.cache.layout import ExactRows, exact_rows
from localkv.cache.profile import (
    KVProfile,
    LayerFacts,
    ProfiledCache,
    SideFacts,
    TypeList,
    packed_ranges,
    profiled,
    read_kv_scales,
    read_profile,
    write_profile,
)
from localkv.config import CacheConfig
from localkv.errors import UsageError

SIDE = SideFacts(
    2, 32, packed_ranges(np.full((2, 32), -1, np.float32), np.full((2, 32), 2, np.float32)), {}
)
FACTS = LayerFacts(
    SIDE,
    SideFacts(
        2,
        32,
        SIDE.packed_ranges,
        {"q4_0": 0.5, "q8_0": 1e-4},
        exponents=((0, 1) * 16, (-2, 8) * 16),
        codebooks=((-85, -26, 26, 85),),
    ),
)
SMALL = TypeList((("q4_0", "q4_0"), None), 4.5, 144, 0.25, 0.5, 64, 4)
LARGE = TypeList((("q8_0", "q4_0"), None), 6.5, 208, 0.125, 0.0625)
PROFILE = KVProfile(
    "ab" * 16, "llama", "tïny", "text", 64, 31, "auto", 0.01, 1e10, 0.5, (FACTS, None),
    (SMALL, LARGE), (SMALL,), {"q4_1c/q4_1": 0.03125},
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_profile(tmp_path / "p.json", PROFILE)
    return tmp_path / "p.json"


def test_there_and_back(file: Path) -> None:
    """A file from before pairs were measured, and tails, has none."""
    assert read_profile(file) == PROFILE
    data = json.loads(file.read_text())
    del data["pairs"]
    for one in (*data["lists"], *data["uniform"]):
        del one["kv_tail"], one["kv_sink"]
    file.write_text(json.dumps(data))
    small = replace(SMALL, kv_tail=None, kv_sink=None)
    older = replace(PROFILE, pairs={}, lists=(small, LARGE), uniform=(small,))
    assert read_profile(file) == older


def test_former_names_of_types(file: Path) -> None:
    """A file from before types were renamed is read with today's names."""
    side = replace(SIDE, kld={"kv3_1c": 0.5, "kv2_0": 1.0})
    types = replace(SMALL, layers=(("kv3_1c", "kv2_0"), None))
    profile = replace(
        PROFILE, layers=(replace(FACTS, k=side), None), lists=(types,), pairs={"kv3_1c/kv3_0": 0.25}
    )
    write_profile(file, profile)
    text = file.read_text()
    file.write_text(text.replace('"kv2', '"q2').replace('"kv3', '"q3').replace("/kv", "/q"))
    assert '"q3_1c/q2_0"' in file.read_text()
    assert read_profile(file) == profile


def damaged(file: Path, change: Any) -> str:
    data = json.loads(file.read_text())
    change(data)
    other = file.with_name("other.json")
    other.write_text(json.dumps(data))
    with pytest.raises(UsageError) as error:
        read_profile(other)
    assert "\n" not in str(error.value)
    assert "localkv calibrate" in (error.value.hint or "")
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(extra=1), "unknown key 'extra'"),
        (lambda d: d.update(smoothing={}), "smoothing is not a number"),
        (lambda d: d["layers"][0]["k"].update(exponents=[[0]]), "exponents of k of layer 0"),
        (lambda d: d["layers"][0]["k"].update(codebooks=[[1, 2, 2, 3]]), "numbers of a codebook"),
        (lambda d: d["layers"][0]["k"].update(codebooks=[[*range(-16, 14, 2), 15]]), "16 are even"),
        (lambda d: d["layers"][0]["k"].update(more=1), "unknown key 'more' in k of layer 0"),
        (lambda d: d.pop("text"), "it lacks 'text'"),
        (lambda d: d.update(version=9), "version 9 is not supported"),
        (lambda d: d.update(kind="x"), "not a KV profile"),
        (lambda d: d["layers"][0]["v"]["kld"].update(q9=1), "'q9', which is no cache type"),
        (lambda d: d["layers"][0]["v"]["kld"].update(q4_0=-1), "kld of v of layer 0 is -1"),
        (lambda d: d["layers"][0]["v"]["kld"].update(q4_0="1"), "is not a number"),
        (lambda d: d["layers"][0]["v"].update(packed_ranges="AAAA"), "not those of 64 channels"),
        (lambda d: d["layers"][0]["v"].update(packed_ranges="no!"), "not those of 64 channels"),
        (lambda d: d["layers"][0]["v"].update(n_heads=0), "0 heads of 32 channels"),
        (lambda d: d["lists"][0].update(layers=["q4_0/q4_0"]), "not a list of 2"),
        (lambda d: d["lists"][0].update(layers=[None, None]), "are of other layers"),
        (lambda d: d["lists"][0].update(layers=["q4_0", None]), "'', which is no cache type"),
        (lambda d: d.update(lists=[]), "lists is empty"),
        (lambda d: d.update(pairs=[]), "pairs is not an object"),
        (lambda d: d.update(pairs={"q4_0": 1}), "pairs names '', which is no cache type"),
        (lambda d: d.update(pairs={"q4_0/q8_0": None}), "pairs is not a number"),
        (lambda d: d.update(n_tokens=True), "n_tokens is not a count"),
        (lambda d: d.update(kv_rotation="x"), "kv_rotation is 'x'"),
        (lambda d: d["lists"][0].update(kv_tail=-1), "kv_tail of lists[0] is not a count"),
        (lambda d: d["lists"][1].update(kv_sink="4"), "kv_sink of lists[1] is not a count"),
    ],
)
def test_damage_is_one_line(file: Path, change: Any, said: str) -> None:
    assert said in damaged(file, change)


def _check_line(error: UsageError) -> None:
    assert "\n" not in str(error)


@settings(max_examples=60)
@given(st.data())
def test_no_value_in_another_place_is_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any value of the file replaced by any other: it is read, or refused in one line."""
    path = tmp_path_factory.getbasetemp() / "replaced.json"
    write_profile(path, PROFILE)
    root = json.loads(path.read_text())
    node, steps = root, data.draw(st.integers(1, 5))
    for step in range(steps):
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if step == steps - 1 or not isinstance(node[key], dict | list):
            value = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
            node[key] = data.draw(value | st.just(copy.deepcopy(root["layers"])))
            break
        node = node[key]
    path.write_text(json.dumps(root))
    try:
        read_profile(path)
    except UsageError as error:
        _check_line(error)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for text, said in (("{", "not a JSON"), ("[1]", "not a KV profile"), ("NaN", "not a JSON")):
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            read_profile(path)
    with pytest.raises(UsageError, match="No such file"):
        read_profile(tmp_path / "none.json")


def chosen(
    cache: CacheConfig, profile: KVProfile | None, bits: float | None, *, names_types: bool
) -> ProfiledCache:
    group = CacheGroup(2, 32, 32, 0, (0,))
    return profiled(cache, profile, bits, names_types=names_types, groups=(group,), n_batch=512)


def test_types_within_bits() -> None:
    cache = CacheConfig(n_ctx=1 << 20)
    assert chosen(cache, PROFILE, None, names_types=False).cache.layer_types == SMALL.layers
    assert chosen(cache, PROFILE, 6.5, names_types=False).types == LARGE
    with pytest.raises(
        UsageError, match=r"no types that take at most 4 bits per value here"
    ) as error:
        chosen(cache, PROFILE, 4.0, names_types=False)
    assert error.value.hint == "its smallest take 4.52 (--kv-bits)"
    short = chosen(CacheConfig(n_ctx=4096), PROFILE, 6.5, names_types=False)
    assert short.types == LARGE  # in which the other's tail is no small part
    with pytest.raises(UsageError, match="at most 5 bits"):
        chosen(CacheConfig(n_ctx=4096), PROFILE, None, names_types=False)
    with pytest.raises(UsageError, match="and there is none"):
        chosen(cache, None, 4.0, names_types=False)
    types = CacheConfig("q8_0", "q8_0")
    named = chosen(types, PROFILE, None, names_types=True)
    assert (named.types, named.warnings) == (None, ())  # smoothing is for any types
    rough = KVProfile(**{**PROFILE.__dict__, "smoothing": 0.0})
    assert len(chosen(types, rough, None, names_types=True).warnings) == 1
    wants = CacheConfig("nuq2", "f16")
    named = chosen(wants, rough, None, names_types=True)
    assert (named.cache.kv_codebooks, named.warnings) == (PROFILE.codebooks, ())
    turned = chosen(CacheConfig("nuq3", kv_rotation="off"), PROFILE, None, names_types=True)
    assert len(turned.warnings) == 1
    assert "measured with kv_rotation" in turned.warnings[0]
    rotated = chosen(replace(cache, kv_rotation="off"), PROFILE, None, names_types=False)
    assert "measured with kv_rotation auto" in rotated.warnings[0]
    shorter = chosen(replace(cache, kv_tail=32), PROFILE, None, names_types=False)
    assert (shorter.cache.kv_tail, shorter.cache.kv_sink) == (32, 4)
    assert [line.split(":")[0] for line in shorter.warnings] == [
        "the types by layer were measured with a tail of 64, not 32"
    ]


def test_a_named_tail_gets_types_that_were_measured_with_it() -> None:
    """Types that were found with a tail diverge more without, and take fewer bits."""
    found = [
        TypeList((("q4_0", "q4_0"), None), 4.5, 144, 0.1, 0.1 / (tail + sink + 1), tail, sink)
        for tail, sink in ((0, 0), (64, 4), (128, 4))
    ]
    profile, cache = replace(PROFILE, lists=tuple(found)), CacheConfig(n_ctx=1 << 20)

    def types(tail: int | None = None, sink: int | None = None) -> tuple[int, list[str]]:
        own = replace(cache, kv_tail=tail, kv_sink=sink)
        taken = chosen(own, profile, 5.0, names_types=False)
        assert taken.types is not None
        said = [line.split(":")[0].partition("measured with a ")[2] for line in taken.warnings]
        return found.index(taken.types), said

    assert types() == (2, [])
    for (tail, sink), wanted in {
        (0, 0): (0, []),
        (64, 4): (1, []),
        (64, 2): (1, ["sink of 4, not 2"]),
        (32, 4): (2, ["tail of 128, not 32"]),
    }.items():
        assert types(tail, sink) == wanted
    assert types(tail=0) == types(sink=0) == (0, [])
    assert types(sink=4) == (2, [])


def test_types_of_packed_rows_only() -> None:
    """Older files don't say which tail and sink types had by themselves."""
    for k, tail, sink, exact in (
        ("q4_0", 0, 0, False),
        ("q4_0", 64, 0, True),
        ("q4_0", 0, 4, True),
        ("q4_0", None, None, False),
        ("kv3_0", None, None, True),
        ("kv3_0", 0, 0, False),
        ("q4_1c", None, None, True),
    ):
        types = TypeList(((k, "q8_0"), None), 6.0, 1, 0.1, 0.1, tail, sink)
        assert types.has_exact_rows == exact
        found = replace(PROFILE, lists=(types,))
        assert found.without_tail == (() if exact else (types,))
        cache = CacheConfig(n_ctx=1 << 12)
        taken = chosen(cache, found, 99, names_types=False).cache
        group = CacheGroup(2, 32, 32, 0, (0,))
        assert (exact_rows(taken, group, (k, "q8_0")) != ExactRows()) == exact


def test_scales_of_a_profile(tmp_path: Path) -> None:
    """Where all layers are alike; `--kv-scales` takes such a file, too."""
    assert PROFILE.scales() is None
    alike = KVProfile(**{**PROFILE.__dict__, "layers": (FACTS,), "lists": (
        TypeList((("q4_0", "q4_0"),), 4.5, 144, 0.25, 0.5),), "uniform": ()})  # fmt: skip
    write_profile(tmp_path / "p.json", alike)
    scales = read_kv_scales(tmp_path / "p.json")
    assert scales == alike.scales()
    assert scales.absmax_k == ((2.0, 2.0),)
    wants = CacheConfig("fp8_e4m3_head", "f16")
    assert chosen(wants, alike, None, names_types=True).scales == scales
    write_profile(tmp_path / "q.json", PROFILE)
    with pytest.raises(UsageError, match="heads of its layers differ"):
        read_kv_scales(tmp_path / "q.json")
