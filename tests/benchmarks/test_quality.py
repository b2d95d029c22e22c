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
from quality_caches import pairs  # noqa: E402
from quality_recall import answer_logits, encoder_of, make_series  # noqa: E402
from quality_table import BEGIN, END  # noqa: E402

from localkv import LLM  # noqa: E402
from localkv.formats import KV_FORMATS  # noqa: E402


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(ROOT / "models" / "tales-4M-F16.gguf", n_ctx=512, device="cpu")


def test_every_type_is_measured_alone_and_beside_another_on_both_sides() -> None:
    taken = pairs()
    assert len(set(taken)) == len(taken)
    assert {(name, name) for name in KV_FORMATS} <= set(taken)
    mixed = [(type_k, type_v) for type_k, type_v in taken if type_k != type_v]
    assert {type_k for type_k, _ in mixed} == set(KV_FORMATS)
    assert {type_v for _, type_v in mixed} == set(KV_FORMATS)


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


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    page, figures, picture = (tmp_path / name for name in ("page.md", "all.json", "all.png"))
    marks = [mark.format(name) for name in ("cost", "side") for mark in (BEGIN, END)]
    page.write_text("before\n{}\nold\n{}\nbetween\n{}\n{}\nafter\n".format(*marks))
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
