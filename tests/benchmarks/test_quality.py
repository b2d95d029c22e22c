"""`benchmarks/quality.py`: which caches it takes, its probes, and a walk through all of it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.paths import ROOT

PROGRAM = ROOT / "benchmarks" / "quality.py"
sys.path[:0] = [str(ROOT / "models"), str(ROOT / "benchmarks")]

from corpus import make_document  # noqa: E402
from quality_bits import LENGTHS, bits_after  # noqa: E402
from quality_caches import PACKED, Case, cases, once  # noqa: E402
from quality_outliers import bits_without, none_apart  # noqa: E402
from quality_recall import answer_logits, encoder_of, make_series  # noqa: E402
from quality_report import Measured, Report  # noqa: E402
from quality_table import BEGIN, END, TABLES, frontier_table  # noqa: E402

from localkv import LLM  # noqa: E402
from localkv.quality.kv_profile import learn_codebook  # noqa: E402
from localkv.quality.scores import Estimate  # noqa: E402
from localkv.quant_formats import KV_FORMATS  # noqa: E402


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(ROOT / "models" / "tales-4M-F16.gguf", n_ctx=512, device="cpu")


def test_every_type_is_measured_alone_and_beside_another_on_both_sides() -> None:
    taken = {(case.type_k, case.type_v) for case in cases()}
    assert {(name, name) for name in KV_FORMATS} <= taken
    mixed = [pair for pair in taken if pair[0] != pair[1]]
    assert {type_k for type_k, _ in mixed} == set(KV_FORMATS)
    assert {type_v for _, type_v in mixed} == set(KV_FORMATS)
    assert {(name, "f16") for name in PACKED} | {("f16", name) for name in PACKED} <= taken


def rows_kept(n_tokens: int, tail: int | None, sink: int, group: int) -> tuple[int, int]:
    """(rows packed, rows in f16) after a text, token by token."""
    packed, first_of_tail = set[int](), n_tokens
    for p in range(sink, n_tokens):
        if (p - sink + 1) % group == 0:
            packed |= set(range(p + 1 - group, p + 1))
    if tail is not None:
        # the newest ones, and back to where a group begins
        first_of_tail = max(min(sink, n_tokens), n_tokens - tail)
        while first_of_tail > sink and (first_of_tail - sink) % group:
            first_of_tail -= 1
    return len(packed), min(sink, n_tokens) + n_tokens - first_of_tail


@pytest.mark.parametrize(
    ("case", "group", "bits"),
    [
        (Case("q4_0", "q4_0"), 1, 4.5),
        (Case("q4_0", "q4_0", tail=64), 1, 4.5),
        (Case("q8_t", "kv3_0"), 1, 5.875),
        (Case("q4_1c", "q4_1"), 32, 5),
        (Case("q4_1c", "q4_1", tail=0), 32, 5),
        (Case("kv2_1c", "kv2_1"), 32, 3),
        (Case("kv2_1c", "kv2_1", tail=128, sink=7), 32, 3),
        (Case("nuq2", "nuq2", tail=64), 1, 3),
    ],
)
def test_bits_count_tail_and_sink(llm: LLM, case: Case, group: int, bits: float) -> None:
    settled, cache = case.settled, case.cache(1024)
    assert settled.tail is not None
    assert settled.sink is not None
    has_tail = settled.tail or group > 1
    for n in (3, 40, 1000, 1023, *LENGTHS):
        kept = rows_kept(n, settled.tail if has_tail else None, settled.sink, group)
        wanted = (kept[0] * bits + kept[1] * 16) / n
        assert bits_after(cache, llm.config.groups, n) == pytest.approx(wanted, abs=1e-12)
    assert bits_after(cache, llm.config.groups, 1 << 30) == pytest.approx(bits, abs=1e-4)


def test_bits_of_types_by_layer(llm: LLM) -> None:
    layers = (("q4_1c", "q4_1"), *[("q8_0", "q4_0")] * 4)
    cache = Case("mixed", "mixed", layers=layers).cache(1024)
    # 31 groups of 32 tokens after the sink of 4, and a tail that begins with the 30th of them
    packed, exact = 992, 4 + 1024 - (4 + 29 * 32)
    with_tail = (packed * 5 + exact * 16) / 1024
    assert bits_after(cache, llm.config.groups, 1024) == (with_tail + 4 * 6.5) / 5


def test_each_cache_is_measured_once() -> None:
    """A case that comes to the same as another is left out: floats that are not rotated anyway."""
    assert len({case.settled for case in cases()}) == len(cases())
    assert once([Case("q4_0", "q4_0"), Case("q4_0", "q4_0", "on", 0, 0, asks=True)]) == [
        Case("q4_0", "q4_0", asks=True)
    ]
    assert Case("q4_1c", "q4_1").settled == Case("q4_1c", "q4_1", "V", 64, 4)


def test_without_outliers_all_values_of_a_block_share_a_scale() -> None:
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    x[1, 40] = 30
    codec = KV_FORMATS["nuq4"].codec
    apart = codec.decode(codec.encode(x))
    with none_apart():
        planes = codec.encode(x)
        within = codec.decode(planes)
        assert learn_codebook(x, 4) != learn_codebook(np.sign(x), 4)
    assert not planes[1].any()
    d = planes[0].view(np.float16).astype(np.float32)[..., 0]
    np.testing.assert_allclose(np.abs(d), np.abs(x).reshape(3, 2, 32).max(-1) / 127, rtol=0.2)
    errors = np.square(apart - x).mean(1), np.square(within - x).mean(1)
    assert errors[0][1] < errors[1][1] / 20
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), apart)  # as before
    assert bits_without("nuq3") == 3.5


def test_documents_become_the_tokens_that_the_program_would_make(llm: LLM) -> None:
    encoder = encoder_of(llm)
    for genre in ("story chat", "notebook", "list"):
        document = make_document(random.Random(3), genre, 200)
        ids, _ = encoder.encode_document(document)
        assert ids == llm.tokenize(document.text, add_special=False, parse_special=True)


def test_probes_are_answered_as_without_a_shared_beginning(llm: LLM) -> None:
    series = make_series(encoder_of(llm), (40, 150), count=1, seed=0)[0]
    n_right = 0
    for _, probe in series:
        got = answer_logits(llm.engine, probe)
        n_right += bool((got.argmax(1) == np.array(probe.answer)).all())
        whole = llm.logits([*probe.prompt, *probe.answer])
        llm.engine.truncate(random.Random(len(probe.prompt)).randrange(len(probe.prompt)))
        expected = whole[len(probe.prompt) - 1 : -1]
        assert np.linalg.norm(got - expected) < 1e-3 * np.linalg.norm(expected)
    assert n_right > len(series) / 2


def measured(pair: str, bits: float, kld: float, *, tail: int = 0, layers: str = "") -> Measured:
    type_k, _, type_v = pair.partition("/")
    case = Case(type_k, type_v or type_k) if not layers else Case("q8_0", "q8_0")
    return Measured(
        model="plain",
        type_k=case.type_k,
        type_v=case.type_v,
        rotated=case.settled.rotation,
        tail=tail,
        sink=case.settled.sink or 0,
        smoothed=bool(layers),
        variant="",
        layers=layers,
        bits=bits,
        bits_after={1024: bits + tail / 64, 16384: bits + tail / 1024},
        kld=Estimate(kld, 0.0),
        kld_99=kld,
        same_top=Estimate(1.0, 0.0),
        ppl_ratio=1.0,
        recall={},
    )


def test_tails_are_compared_with_tails() -> None:
    found = (
        measured("q4_0", 4.5, 0.5),
        measured("q4_1c/q4_1", 4.4, 0.9),
        measured("q5_0", 5.5, 0.2),
        measured("q4_1", 5.0, 0.6),
        measured("q4_0", 4.5, 0.1, tail=64),
        measured("q5_0", 5.5, 0.01, tail=64),
        measured("q4_0/f16", 4.4, 0.001),
        measured("", 4.9, 0.3, layers="0-4 q4_0/q5_0"),
    )
    report = Report("m", 1, 1024, 1, 1, 0.0, 0.0, found)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in frontier_table(report)]
    at_5 = next(i for i, row in enumerate(rows) if row[0] == "5")
    assert [row[1:] for row in rows[at_5 : at_5 + 3]] == [
        ["no tail", "q4_0", "5.0e-01"],
        ["tail of 64", "q4_0", "1.0e-01"],
        ["by layer", "", "3.0e-01"],
    ]
    assert [row[1:] for row in rows[at_5 + 3 : at_5 + 5]] == [
        ["no tail", "q5_0", "2.0e-01"],
        ["tail of 64", "q4_0", "1.0e-01"],  # 5.5 bits and the tail are more
    ]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    page, figures, picture = (tmp_path / name for name in ("page.md", "all.json", "all.png"))
    marks = [mark.format(name) for name in TABLES for mark in (BEGIN, END)]
    page.write_text(
        "\n".join(["before", marks[0], "old", marks[1], "between", *marks[2:], "after\n"])
    )
    command = [sys.executable, PROGRAM, "--dry-run", "--json", figures, "--plot", picture]
    done = subprocess.run([*command, "--insert", page], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(figures.read_text())
    assert [r["kld"]["value"] == 0 for r in report["results"]].count(True) == 2  # f16, not rotated
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert text.startswith("before\n")
    assert "\nbetween\n" in text
    assert text.endswith(f"{marks[-1]}\nafter\n")
    assert "old" not in text
    command = [sys.executable, PROGRAM, "--from", figures]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.stdout == done.stdout
