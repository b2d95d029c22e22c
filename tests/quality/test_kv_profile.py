"""Measuring a profile: ranges, costs of layers alone, types within budgets; and using it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as GGMLType

from localkv import LLM
from localkv.cache.layout import CodebookUse, codebooks_in_words
from localkv.cache.profile import packed_ranges, write_profile
from localkv.config import CacheConfig
from localkv.engine.engine import Engine
from localkv.engine.logprobs import score
from localkv.errors import UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_fingerprint import model_hash
from localkv.loader.smoothing import Smoothing, smoothing_of
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.attention_shift import attention_shift
from localkv.quality.kv_profile import (
    SELDOM_CHOSEN,
    ChunkCosts,
    Plan,
    Results,
    base_types,
    learn_codebooks,
    measure,
    sensible_types,
)
from localkv.quality.layer_errors import layer_errors
from localkv.quality.ranges import calibrate, channel_ranges
from localkv.quality.scores import calibration_text
from localkv.quant_formats import KV_FORMATS
from localkv.quant_formats.shared.codebooks import NORMAL
from support.held_bytes import held
from support.program import Program
from support.random_model import RandomModel

IDS = np.random.default_rng(3).integers(96, size=200).tolist()
TYPES = ("f16", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RandomModel(n_layers=3).write(tmp_path_factory.mktemp("profile") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Transformer:
    return load_model(path, cpu_backend())[0]


def test_a_layer_alone_costs_what_the_whole_run_says(model: Transformer) -> None:
    """Layers below the changed one are not run again, and the result has the same bits."""
    chunk = ChunkCosts(model, IDS, CacheConfig(n_ctx=256))
    base = base_types(model)
    for layer in range(3):
        types = (*base[:layer], ("q4_0", "f16"), *base[layer + 1 :])
        engine = Engine(model, CacheConfig(n_ctx=256, layer_types=types), n_batch=256)
        first = len(IDS) // 2
        wanted = engine.logits(IDS[:-1])[first:]
        plain = Engine(model, CacheConfig(n_ctx=256), n_batch=256).logits(IDS[:-1])[first:]
        kld = score(wanted, np.array(IDS[first + 1 :]), plain).kld.sum()
        assert kld > 0
        assert chunk.divergence(types) == pytest.approx(kld, rel=1e-4)
    partly = chunk.divergence(types)
    chunk.forget_inputs()
    assert chunk.divergence(types) == partly
    assert chunk.divergence(base) == 0


@pytest.mark.parametrize("backend", [cpu_backend, reference_backend])
def test_layers_move_as_far_as_their_attention(path: Path, backend: Callable[[], Backend]) -> None:
    """More with fewer bits, and on each backend as far as heads of attention themselves are moved
    (`attention_shift`, which runs the whole model with the types)."""
    model = load_model(path, backend())[0]
    types = ("q8_0", "q4_0", "kv2_0")
    variants = {layer: [(side, name) for side in (0, 1) for name in types] for layer in range(3)}
    cache = CacheConfig(n_ctx=256, kv_sink=0)
    errors = layer_errors(model, IDS, cache, variants)
    assert set(errors) == {(i, *one) for i, some in variants.items() for one in some}
    for layer in range(3):
        for side in (0, 1):
            q8_0, q4_0, kv2_0 = (errors[layer, side, name] for name in types)
            assert 0 < 20 * q8_0 < q4_0 < kv2_0 / 3 < 1
    for side, pair in enumerate((("q4_0", "f16"), ("f16", "q4_0"))):
        whole = CacheConfig(*pair, n_ctx=256, kv_sink=0)
        for layer, shift in enumerate(attention_shift(model, IDS, whole, n_batch=256)):
            assert shift is not None
            moved = np.square(shift[:, len(IDS) // 2 :]).mean()
            assert errors[layer, side, "q4_0"] == pytest.approx(moved, rel=0.5)


def test_a_measurement_that_was_broken_off_goes_on(model: Transformer, tmp_path: Path) -> None:
    """With the same profile, and only what is missing is run."""
    plan = Plan(TYPES, (4.5, 8.5), n_ctx=200)
    kept, steps = tmp_path / "p.json.part", list[int]()

    def on_step(done: int, of: int, what: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    given = {"digest": "", "text": "random"}
    whole = measure(model, [IDS], plan, **given)
    with pytest.raises(KeyboardInterrupt):
        measure(model, [IDS], plan, **given, on_step=on_step, results=Results(kept, "this"))
    with kept.open("a") as file:
        file.write('["torn')
    results = Results(kept, "this")
    assert results.n_found > 4
    found = measure(
        model,
        [IDS],
        plan,
        **given,
        on_step=lambda done, of, what: steps.append(done),
        results=results,
    )
    assert found == whole
    assert steps[0] == 5
    assert Results(kept, "this").n_found == len(results)
    assert Results(kept, "another").n_found == 0
    results.finish()
    assert not kept.exists()


def test_ranges_are_those_of_rows(path: Path, model: Transformer) -> None:
    """The CPU, whose pages have an order of their own, against the reference; and absmax of heads
    as it was measured before there were profiles."""
    other = load_model(path, reference_backend())[0]
    pairs = zip(
        channel_ranges(model, [IDS, IDS[:50]], n_ctx=256),
        channel_ranges(other, [IDS, IDS[:50]], n_ctx=256),
        strict=True,
    )
    *_, scales = calibrate(model, [IDS, IDS[:50]], n_ctx=256)
    for layer, (ours, theirs) in enumerate(pairs):
        assert ours is not None
        assert theirs is not None
        for a, b, absmax in zip(ours, theirs, (scales.absmax_k, scales.absmax_v), strict=True):
            np.testing.assert_allclose(a.lo, b.lo, rtol=2e-2, atol=2e-2)
            np.testing.assert_allclose(a.hi, b.hi, rtol=2e-2, atol=2e-2)
            assert np.maximum(a.hi, -a.lo).max(1).tolist() == list(absmax[layer])


def test_a_profile(model: Transformer) -> None:
    steps = list[tuple[int, int]]()
    pairs = (("q4_0", "q4_0"), ("q8_0c", "q4_0"))
    budgets = (2.0, 4.5, 5.5, 8.5, 16.0)
    plan = Plan(TYPES, budgets, n_ctx=200, pairs=pairs, tails=(0,))
    profile = measure(
        model,
        [IDS, IDS[::-1]],
        plan,
        digest="0" * 32,
        text="random",
        on_step=lambda done, of, what: steps.append((done, of)),
    )
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1] == steps[0][1]
    for one, most in zip(profile.lists, (4.5, 5.5, 8.5, 16), strict=True):
        assert one.bits <= most + 1e-9
    assert profile.lists[0].layers == (("q4_0", "q4_0"),) * 3
    assert profile.lists[-1].layers == base_types(model)
    assert profile.lists[-1].verified == profile.lists[-1].predicted == 0
    predicted = [one.predicted for one in profile.lists]
    assert predicted == sorted(predicted, reverse=True)
    joint = {one.layers[0]: one.verified for one in profile.uniform}
    assert joint["q8_0", "q8_0"] < joint["q4_0", "q4_0"]
    assert profile.lists[0].verified == joint["q4_0", "q4_0"] == profile.pairs["q4_0/q4_0"]
    assert set(joint) == {("q4_0", "q4_0"), ("q8_0", "q8_0")}
    assert 0 < profile.pairs["q8_0c/q4_0"] < profile.pairs["q4_0/q4_0"]
    first = profile.layers[0]
    assert first is not None
    assert set(first.k.kld) == {"q8_0", "q4_0"}
    assert first.k.kld["q4_0"] > first.k.kld["q8_0"] > 0
    assert profile.within(5.6, lambda one: one.bits).bits <= 5.6


def test_a_tail_belongs_to_types_that_were_measured_with_it(path: Path, model: Transformer) -> None:
    """Types are found without a tail and with one, that is counted in a budget, and a cache with
    these types has it, unless the user chooses another."""
    plan = Plan(("f16", "q8_0", "q4_0", "q8_0c"), (4.5, 8.5, 16.0), n_ctx=200, tails=(0, 64))
    profile = replace(
        measure(model, [IDS], plan, digest="", text="random"), model=model_hash(open_gguf(path))
    )
    bare, tailed, f16 = ([one for one in profile.lists if one.kv_tail == n] for n in (0, 64, None))
    assert set(profile.without_tail) == {*bare, *f16}
    assert [one.kv_sink for one in (*bare, *tailed, *f16)] == [0, 0, 4, 4, None, None]
    assert [one.bits for one in bare] == [one.bits for one in tailed] == [4.5, 8.5]
    assert 0 < tailed[0].verified < bare[0].verified
    assert "q8_0c" not in {name for one in bare for pair in one.layers if pair for name in pair}
    facts = profile.layers[0]
    assert facts is not None
    assert set(facts.k.kld) == {"q8_0", "q4_0", "q8_0c"}
    alone = (("q4_0", "f16"), *[("f16", "f16")] * 2)
    chunk = ChunkCosts(model, IDS, CacheConfig(n_ctx=256))
    whole = chunk.divergence(alone) / len(chunk.targets)  # not with the tail
    assert facts.k.kld["q4_0"] == pytest.approx(whole, rel=0.3)
    options = {"device": "cpu", "n_ctx": 256, "progress": False, "kv_profile": profile}
    # in a short context a tail of 64 is no small part, so 8.5 bits have no room for it
    assert LLM(path, kv_bits=8.5, **options).kv_types == bare[1]
    llm = LLM(path, kv_bits=16 * 4, **{**options, "n_ctx": 512})
    assert llm.kv_types in f16  # without any loss
    assert (llm.cache.kv_tail, llm.cache.kv_sink) == (None, None)
    only = replace(profile, lists=(tailed[0],))
    options["kv_profile"] = only
    with pytest.raises(UsageError, match="at most 5 bits per value here") as error:
        LLM(path, **options)
    assert re.fullmatch(r"its smallest take [\d.]+ \(--kv-bits\)", str(error.value.hint))
    least = float(str(error.value.hint).split()[3])
    llm = LLM(path, kv_bits=least, **options)
    assert (llm.cache.kv_tail, llm.cache.kv_sink) == (64, 4)
    layout_bytes = llm.memory.cache_k + llm.memory.cache_v
    values = 2 * 3 * model.config.groups[0].n_kv_heads * model.config.groups[0].key_dim
    assert 8 * layout_bytes / 256 / values == pytest.approx(least, abs=1e-3)
    got = llm.logits(IDS[:-1])
    kld = score(got[len(IDS) // 2 :], np.array(IDS[len(IDS) // 2 + 1 :]), _f16(path)).kld.mean()
    assert kld == pytest.approx(tailed[0].verified, rel=1e-3)
    other = LLM(path, kv_bits=least, kv_tail=0, **options)
    assert other.cache.kv_tail == 0
    assert [line for line in other.warnings if "a tail of 64, not 0" in line]
    assert not [line for line in llm.warnings if "measured with" in line]


def _f16(path: Path) -> np.ndarray:
    """Logits of the scored half of `IDS`."""
    return LLM(path, device="cpu", n_ctx=256, progress=False).logits(IDS[:-1])[len(IDS) // 2 :]


def test_ranges_are_rounded_away_from_0() -> None:
    rng = np.random.default_rng(0)
    lo, hi = -rng.random((2, 8)).astype(np.float32), rng.random((2, 8)).astype(np.float32)
    from localkv.cache.profile import SideFacts

    side = SideFacts(2, 8, packed_ranges(lo, 9 * hi), {})
    assert (side.ranges[..., 0] <= lo).all()
    assert (side.ranges[..., 1] >= 9 * hi).all()
    np.testing.assert_allclose(side.ranges[..., 1], 9 * hi, rtol=2e-3)
    hi[1, 3] = 100
    assert SideFacts(2, 8, packed_ranges(lo, hi), {}).outliers == ((1, 3),)


def test_there_is_a_text_and_types_to_measure() -> None:
    assert 1000 < len(calibration_text().split()) < 3000
    assert {"f16", "q8_0", "q4_0"} < set(sensible_types())
    assert not {"f32", "fp8_e4m3_head", "nuq4", "q4_1"} & set(sensible_types())
    assert set(SELDOM_CHOSEN) < set(KV_FORMATS)


def test_smoothing_and_codebooks(tmp_path: Path, program: Program) -> None:
    """They are measured, kept and used, and smoothing leaves the model as it is; what it copies is
    planned for. Scales of heads that are smoothed otherwise are refused."""
    random = RandomModel(n_layers=2)
    random.tensors["blk.1.attn_k.weight"][6:8] *= 16
    path = random.write(tmp_path / "model.gguf", GGMLType.F32)
    plain = load_model(path, cpu_backend())[0]
    ranges = channel_ranges(plain, [IDS], n_ctx=256)
    absmax_k, absmax_v = (
        {i: found[side].absmax for i, found in enumerate(ranges) if found} for side in (0, 1)
    )
    gguf = open_gguf(path)
    smoothing = smoothing_of(plain.config, gguf.tensors, absmax_k, absmax_v)
    model = load_model(path, cpu_backend(), smoothing=smoothing)[0]
    plan = Plan(("f16", "nuq3"), (5.0,), n_ctx=256)
    profile = measure(model, [IDS], plan, digest=model_hash(gguf), text="t", smoothing=smoothing)
    assert max(smoothing.k[1][0]) >= 2
    assert Smoothing.of_profile(profile) == smoothing
    assert [(b.layer, b.side, len(b.numbers)) for b in profile.codebooks] == [
        (layer, side, 8) for layer in range(2) for side in "kv"
    ]
    assert all(b.numbers != NORMAL[8] for b in profile.codebooks)
    write_profile(tmp_path / "p.json", profile)
    options = {"device": "cpu", "n_ctx": 256}
    types = {"cache_type_k": "nuq3", "cache_type_v": "nuq3"}
    before, after = (
        LLM(path, **types, **options, kv_profile=by) for by in (None, tmp_path / "p.json")
    )
    book = after.engine.cache.layers[1].segments[0].codebook_k
    assert tuple(book[:8].astype(int)) == profile.codebooks[2].numbers
    said = [codebooks_in_words(llm.engine.cache.codebooks) for llm in (before, after)]
    assert said == [
        "K nuq3, V nuq3: of normal numbers, without a profile's",
        "K nuq3, V nuq3: of the profile",
    ]
    exact = LLM(path, cache_type_k="f32", cache_type_v="f32", **options).logits(IDS)
    errors = [np.square(llm.logits(IDS) - exact).mean() for llm in (before, after)]
    assert errors[1] < 0.9 * errors[0]
    same = LLM(path, cache_type_k="f32", cache_type_v="f32", **options, kv_profile=profile)
    np.testing.assert_array_equal(same.logits(IDS), exact)
    mapped, copied = held(after)
    assert copied > held(before)[1]
    assert (after.memory.weights_mapped, after.memory.weights_allocated) == (mapped, copied)
    planned = program("plan", path, "-dev", "cpu", "--kv-profile", tmp_path / "p.json", "--json")
    facts = json.loads(planned.out)
    assert (facts["weights_mapped"], facts["weights_allocated"]) == (mapped, copied)
    rows = facts["profile"]["lists"][0]
    weights = rows["total"] - rows["cache_k"] - rows["cache_v"] - facts["scratch"]
    assert weights == mapped + copied

    by_head = {"cache_type_k": "fp8_e4m3_head", "cache_type_v": "f16", **options}
    scales = profile.scales()
    assert scales is not None
    LLM(path, **by_head, kv_scales=scales, kv_profile=profile)
    for smoothing, by, said in (
        ("", profile, "without the smoothing of the KV profile"),
        ("other", profile, "with other smoothing than the KV profile"),
        (scales.smoothing, None, "with smoothing, which is not in use"),
    ):
        with pytest.raises(UsageError, match=said):
            LLM(path, **by_head, kv_scales=replace(scales, smoothing=smoothing), kv_profile=by)


def test_codebooks_of_rows_that_cannot_be_rotated(tmp_path: Path) -> None:
    """Heads of 96 channels are packed as they are. Heads of 80 are no whole blocks, so that
    nothing is learned of them."""
    plan = Plan(("f16", "nuq3"), (5.0,), n_ctx=200)
    for head_dim, n_found in ((96, 4), (80, 0)):
        path = RandomModel(head_dim=head_dim).write(tmp_path / f"{head_dim}.gguf")
        model = load_model(path, cpu_backend())[0]
        found = learn_codebooks(model, [IDS], plan)
        assert len(found) == n_found
        assert found == learn_codebooks(model, [IDS], replace(plan, kv_rotation="off"))
    model = load_model(RandomModel().write(tmp_path / "64.gguf"), cpu_backend())[0]
    assert learn_codebooks(model, [IDS], plan) == learn_codebooks(
        model, [IDS], replace(plan, kv_rotation="on")
    )
    assert learn_codebooks(model, [IDS], plan) != learn_codebooks(
        model, [IDS], replace(plan, kv_rotation="off")
    )


def test_layers_with_codebooks_of_both_kinds_are_named() -> None:
    measured = {("k", 2), *(("v", i) for i in range(4))}
    uses = [CodebookUse(i, s, "nuq4", (s, i) in measured) for s in "kv" for i in range(4)]
    assert codebooks_in_words(uses) == (
        "K nuq4 (layers 2), V nuq4: of the profile; "
        "K nuq4 (layers 0-1, 3): of normal numbers, without a profile's"
    )
