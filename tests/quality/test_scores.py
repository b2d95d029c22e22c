"""Perplexity and divergence: the formulas, the whole way through a cache, and the command."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from localkv import LLM
from localkv.cache.layout import context_bytes, mean_bits
from localkv.commands.cache_pairs import fitting_pairs
from localkv.commands.perplexity import cut, unbeaten
from localkv.config import CacheConfig
from localkv.engine.logprobs import TokenScores, score
from localkv.errors import LocalKVError, UsageError
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.quality.scores import (
    MIN_CONTEXT,
    base_cache,
    divergence,
    joined,
    mean,
    perplexity,
    score_chunks,
    text_chunks,
)
from localkv.quant_formats import KV_FORMATS
from support.paths import DATA, MODELS
from support.program import Program, localkv_process

N_CTX = 32
TEXT = "The fox said hello to the owl, and the owl said hello to the fox. " * 12
F16 = MODELS / "tales-4M-F16.gguf"
FITTING = [
    fmt.name
    for fmt in KV_FORMATS.values()
    if 64 % fmt.block_size == 0 and not fmt.scales_by_head  # those need a file
]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, n_ctx=N_CTX)


@pytest.fixture(scope="module")
def chunks(llm: LLM) -> list[list[int]]:
    return text_chunks(llm.tokenize(TEXT), N_CTX, bos_id=1, limit=3)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT + "\n", encoding="utf-8")
    return path


@pytest.fixture
def measured(program: Program, tiny_model: Path, text_file: Path) -> Callable[..., dict]:
    """What `--json` prints with some options."""

    def run(*options: object) -> dict:
        result = program(
            *("perplexity", "-m", tiny_model, "-f", text_file, "-c", N_CTX, "--json", *options)
        )
        assert (result.code, result.err) == (0, "")
        return json.loads(result.out)

    return run


# -- the text


def test_chunks_start_with_bos_and_leave_the_rest_out() -> None:
    ids = list(range(100, 129))
    assert text_chunks(ids, 9, bos_id=1) == [
        [1, *range(101, 109)],
        [1, *range(110, 118)],
        [1, *range(119, 127)],
    ]
    assert text_chunks(ids, 9)[2] == list(range(118, 127))
    assert len(text_chunks(ids, 9, limit=2)) == 2
    assert ids == list(range(100, 129))


def test_a_text_of_exactly_one_chunk_is_enough() -> None:
    assert text_chunks(list(range(16)), 16) == [list(range(16))]
    with pytest.raises(UsageError, match="has 15 tokens, but a context of 16 needs at least 16"):
        text_chunks(list(range(15)), 16)
    with pytest.raises(UsageError, match="too short to measure"):
        text_chunks(list(range(15)), MIN_CONTEXT - 1)


# -- the formulas


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def example() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [200, 50] of a model and of its base, and what came."""
    random = np.random.default_rng(3)
    base = random.standard_normal((200, 50)) * 3
    logits = base + random.standard_normal((200, 50)) * 0.4
    return logits, base, random.integers(0, 50, 200)


def example_scores(example: tuple[np.ndarray, ...]) -> TokenScores:
    logits, base, targets = example
    return score(logits, targets, base)


def test_scores_of_tokens(example) -> None:
    logits, base, targets = example
    scores = example_scores(example)
    p, p_base = probabilities(logits), probabilities(base)
    rows = np.arange(200)
    np.testing.assert_allclose(scores.nll, -np.log(p[rows, targets]), rtol=1e-12)
    np.testing.assert_allclose(scores.nll_base, -np.log(p_base[rows, targets]), rtol=1e-12)
    np.testing.assert_allclose(scores.kld, (p_base * np.log(p_base / p)).sum(1), rtol=1e-9)
    np.testing.assert_array_equal(scores.same_top, p.argmax(1) == p_base.argmax(1))
    assert 0 < scores.same_top.mean() < 1


def test_scores_without_a_base(example) -> None:
    logits, base, targets = example
    scores = score(logits, targets)
    np.testing.assert_array_equal(scores.nll, score(logits, targets, base).nll)
    assert np.isnan(scores.nll_base).all()


def test_logits_that_are_no_numbers_are_refused() -> None:
    logits = np.zeros((2, 5), np.float32)
    logits[1, 3] = np.nan
    with pytest.raises(LocalKVError, match="not finite"):
        score(logits, np.array([0, 1]))


def test_perplexity_and_its_error() -> None:
    """llama-perplexity adds it up so: nll2 = sqrt((sum x^2 / n - mean^2) / (n - 1))."""
    x = np.array([0.5, 1.0, 0.25, 3.0, 2.0])
    average = x.sum() / 5
    error = math.sqrt(((x * x).sum() / 5 - average**2) / 4)
    assert mean(x).value == pytest.approx(average, rel=1e-14)
    assert mean(x).error == pytest.approx(error, rel=1e-12)
    assert perplexity(x).value == pytest.approx(math.exp(average), rel=1e-14)
    assert perplexity(x).error == pytest.approx(math.exp(average) * error, rel=1e-12)


def test_divergence_statistics(example) -> None:
    """Against llama-perplexity's sums, written out."""
    scores = example_scores(example)
    found = divergence(scores)
    n = 200
    a, b = scores.nll, scores.nll_base
    ppl, ppl_base = perplexity(a), perplexity(b)
    covariance = ((a * b).sum() / n - a.mean() * b.mean()) / (n - 1)
    ln_error, ln_error_base = ppl.error / ppl.value, ppl_base.error / ppl_base.value
    ratio_error = math.sqrt(ln_error**2 + ln_error_base**2 - 2 * covariance)
    difference_error = math.sqrt(
        ppl.error**2 + ppl_base.error**2 - 2 * ppl.value * ppl_base.value * covariance
    )
    assert found.ppl_base == ppl_base
    assert found.correlation == pytest.approx(covariance / (ln_error * ln_error_base), rel=1e-9)
    assert found.log_ppl_ratio.value == pytest.approx(math.log(ppl.value / ppl_base.value))
    assert found.log_ppl_ratio.error == pytest.approx(ratio_error, rel=1e-9)
    assert found.ppl_ratio.value == pytest.approx(ppl.value / ppl_base.value)
    assert found.ppl_ratio.error == pytest.approx(ratio_error * ppl.value / ppl_base.value)
    assert found.ppl_difference.value == pytest.approx(ppl.value - ppl_base.value)
    assert found.ppl_difference.error == pytest.approx(difference_error, rel=1e-9)
    delta_p = np.exp(-a) - np.exp(-b)
    rms = math.sqrt((delta_p**2).mean())
    mse_error = math.sqrt(((delta_p**4).mean() - (delta_p**2).mean() ** 2) / (n - 1))
    assert found.delta_p.value == pytest.approx(delta_p.mean())
    assert found.rms_delta_p.value == pytest.approx(rms)
    assert found.rms_delta_p.error == pytest.approx(0.5 / rms * mse_error)
    same = scores.same_top.mean()
    assert found.same_top.value == same
    assert found.same_top.error == pytest.approx(math.sqrt(same * (1 - same) / (n - 1)))
    in_order = np.sort(scores.kld)
    assert found.kld.value == pytest.approx(in_order.mean())
    assert found.kld_percentiles[100] == in_order[-1]
    assert found.kld_percentiles[50] == pytest.approx((in_order[99] + in_order[100]) / 2)
    at = 0.99 * (n - 1)  # between two values, as llama-perplexity's `percentile`
    between = in_order[int(at)] + (at - int(at)) * (in_order[int(at) + 1] - in_order[int(at)])
    assert found.kld_percentiles[99] == pytest.approx(between)
    assert found.kld_percentiles[0] == in_order[0]
    assert list(found.delta_p_percentiles.values()) == sorted(
        found.delta_p_percentiles.values(), reverse=True
    )


def test_the_plot_is_cut_where_packed_types_end() -> None:
    packed = [(4.5, 1e-3, "q4_0"), (5.5, 1e-4, "q5_0"), (8.5, 1e-5, "q8_0")]
    wide = [(16.0, 1e-6, "bf16"), (32.0, 1e-8, "f32")]
    assert cut([*packed, *wide]) == (packed, wide)
    assert cut([packed[0], *wide]) == ([packed[0], *wide], [])


def test_the_plot_marks_what_no_other_beats() -> None:
    points = [(16.0, 1e-6, "a"), (8.0, 1e-4, "b"), (8.0, 2e-4, "c"), (4.0, 1e-2, "d")]
    points += [(12.0, 1e-3, "e")]
    assert [name for _, _, name in unbeaten(points)] == ["d", "b", "a"]


# -- through the cache


def run(llm: LLM, chunks: list[list[int]], caches: list[CacheConfig], **options) -> list:
    parts = list(score_chunks(llm.engine.model, chunks, caches, **options))
    return [joined(one) for one in zip(*parts, strict=True)]


@pytest.mark.parametrize("n_batch", [5, 16, 512])
def test_perplexity_is_that_of_the_models_logits(llm: LLM, chunks, n_batch: int) -> None:
    nll = []
    for chunk in chunks:
        p = probabilities(llm.logits(chunk).astype(np.float64))
        nll += [-math.log(p[at, chunk[at + 1]]) for at in range(N_CTX // 2, N_CTX - 1)]
    (scores,) = run(llm, chunks, [llm.cache], n_batch=n_batch)
    assert len(scores.nll) == len(chunks) * (N_CTX // 2 - 1)
    np.testing.assert_allclose(scores.nll, nll, rtol=1e-3)
    assert perplexity(scores.nll).value == pytest.approx(math.exp(np.mean(nll)), rel=1e-4)


@pytest.mark.parametrize("name", FITTING)
def test_a_cache_does_not_differ_from_itself(llm: LLM, chunks, name: str) -> None:
    cache = CacheConfig(name, name, n_ctx=N_CTX)
    (scores,) = run(llm, chunks, [cache], base=cache)
    found = divergence(scores)
    assert not scores.kld.any()
    assert (found.same_top.value, found.same_top.error) == (1, 0)
    assert (found.rms_delta_p.value, found.rms_delta_p.error) == (0, 0)
    assert found.ppl_ratio.value == 1
    assert found.correlation == pytest.approx(1)


def test_divergence_grows_as_the_types_get_coarser(llm: LLM, chunks) -> None:
    caches = [CacheConfig(name, name, n_ctx=N_CTX) for name in ("f16", "f32", "bf16")]
    scores = run(llm, chunks, caches, base=base_cache(N_CTX))
    f16, f32, bf16 = (divergence(s).kld.value for s in scores)
    assert f16 == 0
    assert 0 < f32 < 1e-5
    assert f32 < bf16 < 1e-2


def test_k_and_v_are_chosen_apart(llm: LLM, chunks) -> None:
    pairs = [("bf16", "f16"), ("f16", "bf16"), ("bf16", "bf16")]
    caches = [CacheConfig(k, v, n_ctx=N_CTX) for k, v in pairs]
    scores = run(llm, chunks, caches, base=base_cache(N_CTX))
    values = {divergence(s).kld.value for s in scores}
    assert len(values) == 3
    assert 0 not in values


def test_bits_and_bytes(llm: LLM) -> None:
    for name in FITTING:
        cache = CacheConfig(name, "f32", n_ctx=N_CTX, kv_sink=0)
        bits = (8 * KV_FORMATS[name].row_bytes(64) / 64 + 32) / 2
        values = (
            2
            * N_CTX
            * llm.config.n_layers
            * llm.config.groups[0].n_kv_heads
            * llm.config.groups[0].key_dim
        )
        assert mean_bits((cache.type_k, cache.type_v), llm.config) == bits
        if KV_FORMATS[name].group_tokens == 1:  # others have a tail as well
            assert context_bytes(cache, llm.config) == bits * values / 8


@pytest.mark.slow
def test_llama_cpp_measures_the_same() -> None:
    """Perplexity to 1e-3, and the size of the divergence of packed types, where they exist."""
    path = DATA / "llama_cpp_perplexity.json"
    golden = json.loads(path.read_text())
    assert hashlib.sha256(F16.read_bytes()).hexdigest() == golden["sha256"], (
        "the model was trained anew: run tests/data/make_llama_cpp_perplexity.py"
    )
    n_ctx = golden["n_ctx"]
    llm = LLM(F16, n_ctx=n_ctx)
    ids = llm.tokenize(golden["text"])
    assert len(ids) == golden["n_tokens"]
    rows = [r for r in golden["results"] if {r["type_k"], r["type_v"]} <= set(KV_FORMATS)]
    caches = [CacheConfig(r["type_k"], r["type_v"], n_ctx=n_ctx) for r in rows]
    chunks = text_chunks(ids, n_ctx, bos_id=llm.tokenizer.bos_id)
    for row, scores in zip(rows, run(llm, chunks, caches, base=base_cache(n_ctx)), strict=True):
        ppl, found = perplexity(scores.nll), divergence(scores)
        assert ppl.value == pytest.approx(row["ppl"], rel=1e-3)
        assert ppl.error == pytest.approx(row["ppl_error"], rel=1e-2)
        # a few tokens make most of it, and the rounding of everything else moves those too
        assert found.kld.value == pytest.approx(row["kld"], rel=0.5)
        assert found.same_top.value == pytest.approx(row["same_top"], abs=5e-3)


# -- the command


def test_the_final_estimate_is_all_of_stdout(program, tiny_model, text_file, measured) -> None:
    argv = ("perplexity", "-m", tiny_model, "-f", text_file, "-c", N_CTX)
    result = program(*argv)
    ppl = measured()["results"][0]["ppl"]
    assert (result.code, result.err) == (0, "")
    assert result.out == f"Final estimate: PPL = {ppl['value']:.4f} +/- {ppl['error']:.5f}\n"
    with_stdin = program(*argv[:4], "-", *argv[5:], stdin=text_file.read_bytes())
    assert with_stdin.out == result.out


def test_json(measured, tiny_model: Path, text_file: Path) -> None:
    report = measured("--chunks", 2)
    assert list(report) == [
        *("model", "text", "n_ctx", "n_batch", "prefill_exact", "base", "results", "seconds"),
        *("backend", "products", "warnings"),
    ]
    assert "float32 activations" in report["products"]
    assert report["model"] == {"path": str(tiny_model), "name": "tiny", "architecture": "llama"}
    assert report["text"] == {
        "path": str(text_file),
        "n_tokens": report["text"]["n_tokens"],
        "n_chunks": 2,
        "n_scored": 2 * (N_CTX // 2 - 1),
    }
    assert report["text"]["n_tokens"] > 2 * N_CTX
    assert (report["n_ctx"], report["base"], report["warnings"]) == (N_CTX, None, [])
    assert (report["n_batch"], report["prefill_exact"]) == (512, False)
    (result,) = report["results"]
    assert (result["type_k"], result["type_v"]) == ("f16", "f16")
    assert result["bits_per_value"] == 16
    assert result["bytes"] == N_CTX * 2 * 64 * 2 * 2
    assert set(result["ppl"]) == {"value", "error"}
    assert result["divergence"] is None


def test_json_of_a_budget(measured) -> None:
    """Pages differ, so there is no one number of bits; the bytes are those allocated."""
    ladder = ("f16/f16", "q8_0/q8_0", "q4_0/q4_0")
    (result,) = measured(*("--chunks", 1, "--kv-budget", "64KiB", "--kv-ladder", ",".join(ladder)))[
        "results"
    ]
    assert (result["type_k"], result["type_v"]) == ("f16", "f16")
    assert result["kv_budget"] == 64 * 1024
    assert result["kv_ladder"] == list(ladder)
    assert result["bits_per_value"] is None
    assert 0 < result["bytes"] <= 64 * 1024


def test_kl_divergence(program, tiny_model, text_file, measured) -> None:
    options = ("-c", N_CTX, "--kl-divergence", "-ctk", "bf16", "-ctv", "f32")
    report = measured(*options)
    assert report["base"] == {"type_k": "f16", "type_v": "f16", "kv_rotation": "off"}
    (result,) = report["results"]
    assert (result["type_k"], result["type_v"]) == ("bf16", "f32")
    found = result["divergence"]
    assert 0 < found["kld"]["value"] < 1e-2
    assert 0.9 <= found["same_top"]["value"] <= 1
    assert found["kld_percentiles"]["100"] >= found["kld_percentiles"]["99.9"]
    assert found["delta_p_percentiles"]["0"] <= found["delta_p"]["value"]
    lines = program("perplexity", "-m", tiny_model, "-f", text_file, *options).out.splitlines()
    labels = [line.split(":")[0].strip() for line in lines]
    for label in (
        *("Mean PPL(Q)", "Mean PPL(base)", "Cor(ln(PPL(Q)), ln(PPL(base)))", "Mean    KLD"),
        *("Maximum KLD", "99.9%   KLD", "99.0%   KLD", "Median  KLD", "Minimum KLD"),
        *("Mean    Δp", "25.0%   Δp", "RMS Δp", "Same top p"),
    ):
        assert labels.count(label) == 1, label
    assert lines[-1].startswith("Final estimate: PPL = ")


def test_a_sweep(program, tiny_model, text_file) -> None:
    argv = ("perplexity", "-m", tiny_model, "-f", text_file, "-c", N_CTX, "--chunks", 2)
    result = program(*argv, "--sweep", "f16/f16, bf16/F32,f16/f16")
    assert (result.code, result.err) == (0, "")
    header, *rows = (line.split() for line in result.out.splitlines())
    assert " ".join(header) == "K/V bits KV MiB PPL +/- KLD mean +/- KLD 99 % RMS Δp same top"
    assert [row[:3] for row in rows] == [["f16/f16", "16", "0.016"], ["bf16/f32", "24", "0.023"]]
    assert rows[0][5:] == ["0", "0", "0", "0.000", "%", "100.00", "%"]
    assert float(rows[1][5]) > 0


def test_a_sweep_measures_what_single_runs_measure(measured) -> None:
    sweep = measured("--sweep", "bf16/f16,f32/bf16")
    for swept in sweep["results"]:
        types = ("-ctk", swept["type_k"], "-ctv", swept["type_v"])
        assert measured("--kl-divergence", *types)["results"] == [swept]


def test_pure_and_all_are_the_types_that_fit(measured, tiny_model) -> None:
    pure = measured("--sweep", "pure", "--chunks", 1)["results"]
    assert [(r["type_k"], r["type_v"]) for r in pure] == [(name, name) for name in FITTING]
    spec = model_spec(open_gguf(tiny_model))
    every = fitting_pairs("all", spec, False, "--sweep")
    assert every == [(k, v) for k in FITTING for v in FITTING]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--sweep", "f16"], "error: --sweep: 'f16' is not a pair of cache types"),
        (["--sweep", "f16/f99"], "error: --sweep: unknown cache type 'f99'"),
        (["--sweep", ","], "error: --sweep names no pair of cache types"),
        (["--sweep", "pure", "-ctk", "f16"], "error: --sweep names the cache types"),
        (["--plot", "x.png"], "error: --plot draws what --sweep measures"),
        (["--sweep", "pure", "--plot", "x.txt"], "error: --plot x.txt: not a kind of picture"),
        (["--chunks", "0"], "error: --chunks 0 leaves nothing to measure"),
        (["-c", "4"], "error: a context of 4 tokens is too short to measure with"),
        (["--kl-divergence-base", "x"], "error: --kl-divergence-base x is not supported"),
        (["--hellaswag"], "error: --hellaswag is not supported"),
    ],
)
def test_errors(program, tiny_model, text_file, options: list[str], line: str) -> None:
    result = program("perplexity", "-m", tiny_model, "-f", text_file, *options)
    assert (result.code, result.out) == (2, "")
    assert result.err_lines[0].startswith(line)
    assert len(result.err_lines) <= 2


def test_a_sweep_with_a_tail(program, tiny_model, text_file) -> None:
    options = ("-f", text_file, "-c", N_CTX, "--chunks", 1, "--kv-tail", 16)
    run = ("perplexity", "-m", tiny_model, *options, "--json", "--sweep")
    with_f16 = json.loads(program(*run, "f16/f16,q4_0/q4_0").out)["results"]
    (alone,) = json.loads(program(*run, "q4_0/q4_0").out)["results"]
    assert with_f16[1] == alone
    without = program(*run, "q4_0/q4_0", "--kv-tail", 0)
    assert json.loads(without.out)["results"][0]["ppl"] != alone["ppl"]
    refused = program(*run, "f16/f16,f32/f16")
    assert refused.code == 2
    assert "leave out --kv-tail" in refused.err_lines[1]


def test_a_short_text_says_how_many_tokens_it_takes(program, tiny_model, tmp_path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("The fox said hello to the owl.")
    result = program("perplexity", "-m", tiny_model, "-f", path)
    n = len(LLM(tiny_model).tokenize("The fox said hello to the owl."))
    assert result.code == 2
    assert f"error: the text has {n} tokens, but a context of 512 needs at least 512" in result.err
    assert f"hint: use a longer text, or a context of at most {n} (-c)" in result.err
    missing = program("perplexity", "-m", tiny_model, "-f", tmp_path / "none.txt")
    assert missing.err_lines == [f"error: the text {tmp_path}/none.txt: No such file or directory"]
    assert program("perplexity", "-m", tiny_model).err_lines[0].startswith("error: -f/--file")


def test_without_matplotlib_a_plot_is_refused(
    program, monkeypatch, tiny_model, text_file, tmp_path
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    path = tmp_path / "sweep.png"
    argv = ("perplexity", "-m", tiny_model, "-f", text_file, "--sweep", "pure", "--plot", path)
    result = program(*argv)
    assert (result.code, result.out) == (2, "")
    assert result.err_lines == [
        "error: --plot needs matplotlib",
        "hint: pip install 'localkv[plot]'",
    ]
    assert not path.exists()


def test_plot(program, tiny_model, text_file, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    argv = ("perplexity", "-m", tiny_model, "-f", text_file, "-c", N_CTX, "--chunks", 1)
    result = program(*argv, "--sweep", "f16/f16,bf16/f16,bf16/bf16", "--plot", path)
    assert result.code == 0
    assert result.err == "note: f16 is not in the picture: its divergence is 0\n"
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_progress_shows_on_a_terminal_only(tiny_model, text_file) -> None:
    import os
    import pty

    ours, theirs = pty.openpty()
    argv = ("perplexity", "-m", tiny_model, "-f", text_file, "-c", N_CTX, "--chunks", 2)
    with localkv_process(*argv, stderr=theirs) as process:
        os.close(theirs)
        out, _ = process.communicate(timeout=60)
    shown = ""
    try:
        while part := os.read(ours, 4096).decode():
            shown += part
    except OSError:  # Linux's way to say that the other end is closed
        pass
    os.close(ours)
    assert out.startswith(b"Final estimate: PPL = ")
    assert "chunk 1 of 2: K f16 V f16, PPL " in shown
    assert shown.endswith("\r\x1b[K")
