"""`localkv calibrate`, and commands that use what it wrote."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

import localkv.llm as loaded_engine
import localkv.loader.weights as weights_module
from localkv import LLM
from localkv.cache.layout import in_words, mean_bits_of
from localkv.cache.profile import KVProfile, TypeList, read_profile, write_profile
from localkv.commands.calibrate import CalibrateProgress
from localkv.config import CacheConfig
from localkv.errors import UsageError
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_fingerprint import model_hash
from localkv.loader.model_header import model_spec
from localkv.loader.weights import load_model
from localkv.quality.kv_profile import Plan, measure, sensible_types
from support.random_model import RandomModel, variant
from support.tiny_model import write_tiny_model

MEASURE = ("--tokens", "64", "--types", "q8_0,q4_0", "--bits", "4.5,5.5,6.5", "-t", "2")
MEASURE += ("--kv-tail", "0")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("calibrate") / "tiny.gguf")


@pytest.fixture(autouse=True)
def own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def within(profile: KVProfile, bits: float) -> TypeList:
    """The types by layer that take their packed rows only."""
    return profile.within(bits, lambda one: one.bits)


@pytest.mark.slow
def test_measure_and_use(program, measured: Path, tmp_path: Path) -> None:
    """In the data folder without -o, beside the model, or by name; not with another model."""
    done = program("calibrate", "-m", measured, *MEASURE)
    assert done.code == 0, done.err
    assert "--kv-profile auto" in done.out
    (kept,) = (tmp_path / "data/localkv/profiles").iterdir()
    profile = read_profile(kept)
    ask = ("-p", "Once", "-n", "3", "--temp", "0", "--json")
    used = program("complete", "-m", measured, *ask, "--kv-profile", "auto")
    assert used.code == 0, used.err
    types = within(profile, 5.0)
    assert used.err_lines[0].startswith(f"KV profile: {types.bits:.4g} bits per value by layer")
    pairs = ["/".join(pair) for pair in types.layers if pair]
    assert json.loads(used.out)["cache"]["layer_types"] == pairs
    assert json.loads(used.out)["cache"]["bytes"] == 256 * types.bytes_per_token
    # a preset takes at most its bits, if that is better than its own pair
    assert set(profile.pairs) == {"q8_0c/q4_1", "q8_0/q4_0", "q4_1c/q4_0", "q4_1c128/kv3_0"}
    best = within(profile, 6.5)
    for own, wanted in (
        (2 * best.verified, {"layer_types": ["/".join(pair) for pair in best.layers if pair]}),
        (best.verified, {"type_k": "q8_0", "type_v": "q4_0"}),
    ):
        write_profile(kept, replace(profile, pairs={"q8_0/q4_0": own}))
        for flags in ((), ("--kv-profile", "auto"), ("--kv-profile", kept)):
            preset = program("complete", "-m", measured, *ask, "--preset", "speed", *flags)
            assert preset.code == 0, preset.err
            cache = json.loads(preset.out)["cache"]
            assert {key: cache.get(key) for key in wanted} == wanted
            said = "KV profile: 6.5 bits" if own > best.verified else "preset speed: -ctk q8_0"
            assert preset.err_lines[0].startswith(said)
    write_profile(kept, profile)
    # one of fewer bits than any types by layer has its own pair, even if that was not measured
    for pairs in (profile.pairs, {}):
        write_profile(kept, replace(profile, pairs=pairs))
        small = program("complete", "-m", measured, *ask, "--preset", "memory")
        assert small.err_lines[0] == "preset memory: -ctk q4_1c128 -ctv kv3_0"
    write_profile(kept, profile)
    # types on the command line win
    named = program("complete", "-m", measured, *ask, "--kv-profile", "auto", "-ctk", "q8_0")
    assert "layer_types" not in json.loads(named.out)["cache"]
    is_unused = any("the KV profile is not used" in line for line in named.err_lines)
    assert is_unused == (not profile.smoothing_name)  # else its smoothing is
    twice = program("complete", "-m", measured, *ask, "--kv-bits", "5", "-ctk", "q8_0")
    assert (twice.code, twice.err_lines[0]) == (
        2,
        "error: --kv-bits and -ctk and -ctv both choose the types",
    )
    beside = tmp_path / "copy.gguf"
    shutil.copy(measured, beside)
    shutil.move(kept, beside.with_suffix(".kv.json"))
    llm = LLM(beside, kv_profile="auto", kv_bits=6.5, device="cpu", progress=False)
    assert llm.cache.layer_types == within(profile, 6.5).layers
    assert llm.kv_types == within(profile, 6.5)
    with pytest.raises(UsageError, match=r"there is no KV profile of tiny\.gguf"):
        LLM(measured, kv_profile="auto", device="cpu", progress=False)
    other = write_tiny_model(tmp_path / "other.gguf", n_experts=4)
    with pytest.raises(UsageError, match=r"is of another model, tiny \(llama\)"):
        LLM(other, kv_profile=beside.with_suffix(".kv.json"), device="cpu", progress=False)


def test_time_says_how_many_tokens(program, measured: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    asked = ("--types", "q8_0,q4_0", "--bits", "5", "--kv-tail", "0", "-o", path)
    done = program("calibrate", "-m", measured, *asked, "--time", "0.02")
    assert done.code == 0, done.err
    said = re.search(r"--time 0\.02 is about (\d+) tokens", done.err)
    assert said
    assert read_profile(path).n_tokens <= int(said[1])
    assert not path.with_name("p.json.part").exists()
    short = program("calibrate", "-m", measured, *asked, "--time", "0.0000001")
    assert (short.code, short.err_lines[-1][:5]) == (2, "hint:")
    twice = program("calibrate", "-m", measured, *asked, "--time", "1", "--tokens", "64")
    assert twice.code == 2


def test_types_are_found_with_a_tail_and_without(program, measured: Path, tmp_path: Path) -> None:
    """Types by channel are found only with a tail; a cache says which it got."""
    path = tmp_path / "p.json"
    asked = ("--types", "q8_0,q8_0c", "--bits", "8.5", "--tokens", "256", "-o", path)
    done = program("calibrate", "-m", measured, *asked)
    assert done.code == 0, done.err
    profile = read_profile(path)
    assert [(one.kv_tail, one.kv_sink) for one in profile.lists] == [(64, 4), (0, 0)]
    assert profile.lists[1].layers == ((("q8_0", "q8_0"),) * len(profile.layers))
    rows = [line.split()[:2] for line in done.out.splitlines() if line.startswith("8.500")]
    assert rows == [["8.500", "0"], ["8.500", "64"]]
    run = ("complete", "-m", measured, "-p", "ab", "-n", "1", "-c", "256", "--kv-profile", path)
    for bits, said in (("8.5", "8.5 bits per value by layer, KLD"), ("99", "a tail of 64 tokens")):
        used = program(*run, "--kv-bits", bits)
        assert said in used.err_lines[0], used.err
    longer = program(*run, "--kv-bits", "99", "--kv-tail", "96")
    assert "a tail of 96 tokens" in longer.err_lines[0], longer.err


def test_a_profile_is_not_for_k_before_rope(program, measured: Path) -> None:
    """It was measured after; a preset, which would take it, does without it."""
    run = ("-m", measured, "-p", "ab", "-n", 1, "--device", "reference", "--kv-k-before-rope")
    for options in (("--kv-profile", "auto"), ("--kv-profile", "auto", "-ctk", "nuq4")):
        refused = program("complete", *run, *options)
        assert refused.code == 2
        said = "error: kv_profile: measured of K as it is after RoPE, and k_before_rope keeps it"
        assert refused.err_lines[0].startswith(said)
    preset = ("complete", *run, "-v", "--preset", "quality")
    assert program(*preset).code == 0
    measures = ("-f", __file__, "--calibrate-kv", measured.with_suffix(".json"))
    refused = program("perplexity", *run[:2], *run[-3:], *measures)
    assert refused.err_lines[0] == "error: --calibrate-kv measures K as it is after RoPE"


def test_a_model_is_in_memory_once(
    program, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was loaded is gone before the smoothed model is."""
    first: list[weakref.ref] = []
    load = loaded_engine.load_model

    def load_first(*args, **options):
        found = load(*args, **options)
        first.extend(map(weakref.ref, (found[0].weights, found[0].backend)))
        return found

    def load_again(*args, **options):
        assert options["smoothing"].k
        assert [kept() for kept in first] == [None, None]
        raise UsageError("loaded again")

    monkeypatch.setattr(loaded_engine, "load_model", load_first)
    monkeypatch.setattr(weights_module, "load_model", load_again)
    done = program("calibrate", "-m", measured, *MEASURE, "-o", tmp_path / "p.json")
    assert done.err_lines[-1] == "error: loaded again", done.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--types", "q8"), "error: --types: unknown cache type 'q8'"),
        (("--types", "f16"), "error: --types names no type to compare with f16"),
        (("--bits", "5,x"), "error: --bits 5,x: not a list of bits per value"),
        (
            ("--types", "q4_0", "--bits", "5,4"),
            "error: --bits 4 holds none of the types; the smallest has 4.5",
        ),
        (("--bits", ","), "error: --bits ,: not a list of bits per value"),
        (("--kv-tail", "0,x"), "error: --kv-tail 0,x: not a list of tokens"),
        (("--kv-tail", "1_0"), "error: --kv-tail 1_0: not a list of tokens"),
        (("--kv-tail", "0,1048577"), "error: --kv-tail 0,1048577: not a list of tokens"),
        (
            ("--tokens", "255"),
            "error: a tail of 64 tokens is measured with 256 tokens at a time at least, and these "
            "are 255",
        ),
        (
            ("--types", "q4_0,q4_1c", "--kv-tail", "0"),
            "error: --types q4_1c packs 32 tokens together, and --kv-tail 0 measures types that",
        ),
        (("-f", "short.txt"), "error: the text has 3 tokens, too few to measure with"),
        (("-f", "none.txt"), "error: the text none.txt"),
        (("-o", "nowhere/p.json"), "error: nowhere is not a folder"),
    ],
)
def test_what_cannot_be_measured(
    program, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("the fox")
    result = program("calibrate", "-m", measured, *flags)
    assert result.code == 2
    assert result.err_lines[0].startswith(said)


def test_no_budget_holds_any_types(
    program, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured in vain: a profile without types by layer is none."""
    heads = RandomModel(n_layers=1, head_dim=80).write(tmp_path / "80.gguf")
    least = Plan(tuple(sensible_types())).least_bits(model_spec(open_gguf(heads)))
    assert least == 16
    monkeypatch.setattr(Plan, "least_bits", lambda plan, config: least)
    done = program("calibrate", "-m", measured, "-o", tmp_path / "p.json")
    assert (done.code, done.err_lines[0]) == (
        2,
        "error: the smallest types that go with this model's heads have 16 bits per value, and 8.5 "
        "is the largest budget",
    )
    assert not (tmp_path / "p.json").exists()


@pytest.mark.slow
def test_plan_and_bench(program, measured: Path, tmp_path: Path) -> None:
    """Types by layer from a profile: the fewest bits that are good enough, or those that fit."""
    unknown = program("plan", measured, "--memory", "1GiB")
    assert "there is no KV profile of this model: localkv calibrate" in unknown.err
    assert program("plan", measured, "--max-kld", "1").code == 2
    shape = program("plan", "--synthetic", "llama-1b:q4_K", "--memory", "1GiB", "--max-kld", "1")
    assert shape.err_lines[0] == "error: --max-kld needs the model itself, not only its header"
    path = tmp_path / "p.json"
    assert program("calibrate", "-m", measured, *MEASURE, "-o", path).code == 0
    profile = read_profile(path)
    good = max(profile.lists, key=lambda one: one.bits)
    asked = ("--kv-profile", path, "--max-kld", f"{good.verified:.17g}")
    planned = program("plan", measured, *asked, "--json")
    found = json.loads(planned.out)["profile"]
    assert found["bits"] == min(one.bits for one in profile.lists if one.verified <= good.verified)
    row = next(one for one in found["lists"] if one["bits"] == good.bits)
    assert row["cache_k"] + row["cache_v"] == 256 * good.bytes_per_token
    assert row["kld_verified"] == good.verified
    text = program("plan", measured, "--kv-profile", path, "--memory", "1GiB").out.splitlines()
    assert text[-3].startswith("by layer: the least divergence that 256 tokens have room for")
    assert text[-1].startswith(f"localkv chat -m {measured} -c 256 --kv-profile {path} --kv-bits")
    flags = ("--kv-tail", "64", "--kv-sink", "2", "-ub", "128")
    tailed = ("plan", measured, "--kv-profile", path, "--memory", "1GiB", *flags)
    lines = program(*tailed, "-c", "8192").out.splitlines()
    assert lines[-1].endswith(" ".join(flags))
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["bits", "tail"])
    assert lines[head + 1].split()[1] == "64"  # what the cache has, not what was measured
    short = program(*tailed).out.splitlines()[-1]
    assert short.startswith("by layer: in 256 tokens f16 takes no more than these")
    long = program("plan", measured, *asked, "--memory", "16MiB", "-c", "1000000").out
    longest = re.search(r"; (\d+) tokens fit", long)
    assert longest is not None
    assert long.splitlines()[-1].startswith(f"localkv chat -m {measured} -c {longest[1]} ")
    none = program("plan", measured, "--kv-profile", path, "--max-kld", "1e-12").out
    assert "none diverges by at most 1e-12" in none
    run = ("-p", "8", "-n", "2", "-r", "1", "-t", "2", "-o", "json")
    bench = program("bench", "-m", measured, *run, "--kv-profile", path)
    assert bench.code == 0, bench.err
    shown = CacheConfig(layer_types=within(profile, 5.0).layers).shown_types
    assert {(one["type_k"], one["type_v"]) for one in json.loads(bench.out)} == {shown}
    twice = program("bench", "-m", measured, *run, "--kv-profile", path, "-ctk", "q8_0")
    assert twice.err_lines[0] == "error: --kv-profile names the cache types"


@pytest.mark.slow
@pytest.mark.parametrize("tail", [0, 64])
def test_a_planned_cache_is_what_its_command_gets(program, tmp_path: Path, tail: int) -> None:
    """With windows, types may take more bits and fewer bytes than others that diverge less."""
    path = variant("gemma3", n_ctx=1 << 16).write(tmp_path / "model.gguf")
    model = load_model(path, cpu_backend())[0]
    windows = [group for group in model.config.groups if group.reach]
    plan = Plan(("f16", "q8_0"), (8.5,), n_ctx=64, tails=(0,))
    profile = measure(model, [list(range(64))], plan, digest=model_hash(open_gguf(path)), text="t")

    def types(in_windows: str, elsewhere: str, verified: float) -> TypeList:
        names = [in_windows if i in windows[0].layers else elsewhere for i in range(3)]
        pairs = tuple((name, name) for name in names)
        bits = mean_bits_of(CacheConfig(layer_types=pairs), model.config)
        return TypeList(pairs, bits, 1, verified, verified, tail, 0)

    lists = (types("q8_0", "q4_0", 0.02), types("q4_0", "q8_0", 0.01), types("kv2_0", "kv2_0", 0.9))
    assert len(windows[0].layers) == 2
    file = tmp_path / "p.json"
    write_profile(file, replace(profile, lists=lists))
    for n_ctx in (2048, 1 << 16):
        for most in (0.9, 0.02, 0.01):
            asked = ("plan", path, "-dev", "cpu", "-c", n_ctx, "--kv-profile", file)
            planned = program(*asked, "--memory", "1GiB", "--max-kld", most)
            by_layer = planned.out.splitlines()
            bits = re.search(r"--kv-bits (\S+)", by_layer[-1])
            if bits is None:  # f16 takes no more
                assert tail == 64
                assert n_ctx == 2048
                continue
            options = {"device": "cpu", "progress": False, "kv_profile": file}
            llm = LLM(path, n_ctx=n_ctx, kv_bits=float(bits[1]), **options)
            assert f"K/V: {in_words(llm.cache.layer_types)}" == by_layer[-2]
    # a tail that is named gets types that were measured with it
    others = tuple(replace(one, kv_tail=64 - tail, verified=0.1 * one.verified) for one in lists)
    write_profile(file, replace(profile, lists=(*lists, *others)))
    planned = program(*asked, "--memory", "1GiB", "--kv-tail", tail, "--json")
    found = json.loads(planned.out)["profile"]["lists"]
    assert {one["kv_tail"] for one in found} == {tail}


def test_kernels_that_are_compiled_first_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Time is estimated from the latest steps, and said once if it is long."""
    now = 0.0
    progress = CalibrateProgress(clock=lambda: now)
    for done in range(300):
        progress.step(done, 300, "layer 0, K q4_0")
        now += 60 if done < 1 else 1.5
    assert capsys.readouterr().err == (
        "297 more measurements take about 7 minutes; fewer tokens (--tokens, --time) or types "
        "(--types) take less\n"
    )
    assert progress.seconds == 60 + 299 * 1.5
    quick = CalibrateProgress(clock=lambda: now)
    for done in range(300):
        quick.step(done, 300, "")
        now += 0.1
    assert not capsys.readouterr().err


WEIGHTS = ("--weight-types", "f16,q8_0,q4_0", "--tokens", "64", "-t", "2", "--device", "cpu")


@pytest.mark.slow
def test_weights_and_the_joint_choice(program, measured: Path, tmp_path: Path) -> None:
    """What was measured chooses types within bytes, and `quantize` makes the file of that size."""
    profile, types, made = (tmp_path / name for name in ("w.json", "types.txt", "made.gguf"))
    done = program("calibrate", "-m", measured, *WEIGHTS, "-o", profile)
    assert done.code == 0, done.err
    assert "8-bit activations" in done.out
    done = program("calibrate", "-m", measured, *MEASURE, "-o", tmp_path / "kv.json")
    assert done.code == 0, done.err
    of_cache = ("--kv-profile", tmp_path / "kv.json")
    ask = ("plan", measured, "--quality", profile, "-c", "256", "--device", "cpu")
    every = program(*ask, *of_cache, "--memory", "1GiB", "--json")
    assert every.code == 0, every.err
    curve = json.loads(every.out)["curve"]
    klds = [one["kld"] for one in curve]
    assert klds == sorted(klds, reverse=True)
    assert klds[-1] < klds[0] / 10
    assert {one["cache"] for one in curve} > {"f16"}
    middle = curve[len(curve) // 2]["budget"]
    words = (*ask, *of_cache, "--memory", str(middle), "--save-types", types)
    chosen = program(*words, "--json")
    facts = json.loads(chosen.out)
    assert sum(facts["chosen"][key] for key in ("weights", "cache_bytes", "scratch")) <= middle
    shown = program(*words, "--plot", tmp_path / "curve.svg")
    assert shown.code == 0, shown.err
    assert "--tensor-type-file" in shown.out
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    done = program("quantize", "--tensor-type-file", types, measured, made, "Q8_0")
    assert done.code == 0, done.err
    tensors = open_gguf(made).tensors
    assert {name: tensors[name].format.name for name in facts["types"]} == facts["types"]
    assert sum(tensor.n_bytes for tensor in tensors.values()) == facts["chosen"]["weights"]
    other = program("plan", made, "--quality", profile, "--device", "cpu")
    assert other.code != 0
    assert "of another model" in other.err
    small = program(*ask, "--memory", "1000")
    assert small.code != 0
    assert "smallest of the measured types" in small.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--weight-types", "q4_0"), "-o weights.json"),
        (("--weight-types", "q4_9", "-o", "w.json"), "'q4_9' is not a type of weights"),
        (("--weight-types", "iq1_s", "-o", "w.json"), "needs an importance matrix"),
        (("--weight-types", "iq2_xs", "-o", "w.json"), "needs an importance matrix"),
        (("--weight-types", ",", "-o", "w.json"), "names no type"),
        (("--weight-types", "q4_0", "--bits", "4", "-o", "w.json"), "--bits is for a KV profile"),
        (("--imatrix", "x.gguf"), "--imatrix is for costs of weights"),
    ],
)
def test_wrong_words_about_weights(
    program, measured: Path, options: tuple[str, ...], problem: str
) -> None:
    done = program("calibrate", "-m", measured, *options)
    assert done.code != 0
    assert problem in done.err
    done = program("plan", measured, "--save-types", "x", "--device", "cpu")
    assert done.code != 0
    assert "what --quality FILE chooses" in done.err
