"""`--preset`: the flags it stands for, and who wins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localkv.config import PRESETS, SUGGESTED_PAIRS, USUAL_PAIRS, Preset
from localkv.quant_formats import KV_FORMATS
from support.paths import ROOT
from support.program import Program
from support.random_model import variant


def bits(name: str) -> float:
    return KV_FORMATS[name].bits_per_value(128)


def test_presets_go_from_many_bits_to_few_and_k_never_has_fewer_than_v() -> None:
    sizes = [bits(p.type_k) + bits(p.type_v) for p in PRESETS.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    assert all(bits(p.type_k) >= bits(p.type_v) for p in PRESETS.values())


def table_of_costs() -> dict[str, tuple[float, bool, list[float]]]:
    """What docs/cache-costs.md says of real models, by pair: bits at 16k, whether it has a tail,
    and KLD of each model."""
    page = (ROOT / "docs/cache-costs.md").read_text()
    table = page.partition("<!-- real cost table -->")[2].partition("<!-- end of real cost")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    heads, _, *cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    columns = [i for i, head in enumerate(heads) if head.startswith("KLD: ")]
    found = dict[str, tuple[float, bool, list[float]]]()
    for row in cells:
        at_4k, at_16k = (float(row[heads.index(f"at {n}")]) for n in ("4k", "16k"))
        found[row[0]] = at_16k, at_4k - at_16k > 0.1, [float(row[i]) for i in columns]
    return found


def name_of(preset: Preset) -> str:
    return "/".join(dict.fromkeys((preset.type_k, preset.type_v)))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "quality"])
def test_presets_are_on_the_frontier(name: str) -> None:
    """No pair of as few bits costs a tenth less on the worst model; less is within uncertainty. A
    tail takes time, so a preset without one is compared with others without."""
    rows = table_of_costs()
    n_bits, has_tail, costs = rows[name_of(PRESETS[name])]
    others = [of for at, tail, of in rows.values() if at <= n_bits and (has_tail or not tail)]
    assert max(costs) <= 1.1 * min(map(max, others))


@pytest.mark.parametrize("name", PRESETS)
def test_reasons_quote_the_table_of_costs(name: str) -> None:
    """The least and the largest KLD; for f16 f32's."""
    preset = PRESETS[name]
    *_, costs = table_of_costs()["f32" if name == "quality" else name_of(preset)]
    quoted = re.search(r"\(KLD ([^)]*)\)$", preset.reason)
    assert quoted is not None
    assert [float(cost) for cost in quoted[1].split(" to ")] == sorted({min(costs), max(costs)})


def test_the_page_of_cache_types_gives_the_same_reasons() -> None:
    page = (ROOT / "docs/kv-cache.md").read_text()
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {preset.type_k}/{preset.type_v} | {preset.reason} |\n" in page


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_flags_that_it_names(program: Program, llm, model: Path, name: str) -> None:
    preset = PRESETS[name]
    result = program("complete", "-m", model, "-p", "x", "--preset", name)
    assert result.code == 0, result.err
    assert (llm.loaded["cache_type_k"], llm.loaded["cache_type_v"]) == (
        preset.type_k,
        preset.type_v,
    )
    flags = f"-ctk {preset.type_k} -ctv {preset.type_v}"
    assert result.err_lines[0] == f"preset {name}: {flags}"
    program("complete", "-m", model, "-p", "x", *flags.split())
    assert (llm.loaded["cache_type_k"], llm.loaded["cache_type_v"]) == (
        preset.type_k,
        preset.type_v,
    )


@pytest.mark.parametrize("flags", ["--preset memory -ctk bf16", "-ctk bf16 --preset memory"])
def test_a_type_that_is_given_wins(program: Program, llm, model: Path, flags: str) -> None:
    result = program("complete", "-m", model, "-p", "x", *flags.split())
    assert (llm.loaded["cache_type_k"], llm.loaded["cache_type_v"]) == ("bf16", "kv3_0")
    assert result.err_lines[0] == "preset memory: -ctv kv3_0 (given: -ctk bf16)"


def test_what_is_nearer_wins(program: Program, llm, model: Path) -> None:
    def types(*flags: str) -> tuple[str, str]:
        assert program("complete", "-m", model, "-p", "x", *flags).code == 0
        return llm.loaded["cache_type_k"], llm.loaded["cache_type_v"]

    program.write_config("[complete]\npreset = 'memory'\ncache-type-k = 'f16'\n")
    assert types() == ("f16", "kv3_0")
    assert types("--preset", "balanced") == ("q8_0c", "q4_1")
    program.setenv(LOCALKV_PRESET="speed")
    assert types() == ("q8_0", "q4_0")
    program.setenv(LLAMA_ARG_CACHE_TYPE_V="f32")
    assert types() == ("q8_0", "f32")
    assert types("--preset", "memory") == ("q4_1c128", "kv3_0")


def test_without_one_nothing_is_said(program: Program, llm, model: Path) -> None:
    assert "preset" not in program("complete", "-m", model, "-p", "x").err
    assert program("complete", "-m", model, "-p", "x", "--preset", "memory", "-q").err == ""


def test_an_unknown_one(program: Program, model: Path) -> None:
    result = program("complete", "-m", model, "-p", "x", "--preset", "fast")
    assert result.code == 2
    assert "'fast' is not one of quality, balanced, speed, compact, memory" in result.err


def test_heads_that_the_types_do_not_fit(program: Program, tmp_path: Path) -> None:
    """Never another type in silence: the error names those that work."""
    path = variant("llama", head_dim=80).write(tmp_path / "m.gguf")
    result = program("complete", "-m", path, "-p", "x", "--preset", "speed")
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0] == "preset speed: -ctk q8_0 -ctv q4_0"
    assert result.err_lines[1].startswith("error: K cache type q8_0 with block size 32 does not")
    assert result.err_lines[2].startswith("hint: use f32, f16, bf16, fp8_e4m3")


def test_a_sweep_names_its_types_itself(program: Program, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("x")
    argv = ("perplexity", "-m", "x", "-f", text, "--sweep", "pure")
    result = program(*argv, "--preset", "memory")
    assert result.code == 2
    assert "--sweep names the cache types" in result.err


def test_commands_with_a_cache_take_it(program: Program) -> None:
    for command in ("complete", "chat", "perplexity"):
        assert "--preset NAME" in program(command, "--help").out


def test_usual_pairs_and_those_between_them_by_bits() -> None:
    sizes = [bits(type_k) + bits(type_v) for type_k, type_v in SUGGESTED_PAIRS]
    assert sizes == sorted(sizes, reverse=True)
    assert set(USUAL_PAIRS) <= set(SUGGESTED_PAIRS)
    assert (SUGGESTED_PAIRS[0], SUGGESTED_PAIRS[-1]) == (USUAL_PAIRS[0], USUAL_PAIRS[-1])
    assert all(
        KV_FORMATS[name].group_tokens == 1 for pair in SUGGESTED_PAIRS for name in pair
    )  # no tail
