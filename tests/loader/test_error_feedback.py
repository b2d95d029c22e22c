"""Rounding with error feedback: where codes are, which are chosen, and what that gains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from localkv.kernels.cpu.quantize.rows import encode_rows
from localkv.llm import LLM
from localkv.loader.error_feedback import (
    DAMPING,
    FIRST_SHARE,
    TYPES,
    Moments,
    code_layout,
    decoded,
    encode_with_feedback,
)
from localkv.quality.activations import Met, TextMoments, read_chunks
from localkv.quality.scores import calibration_text, text_chunks
from localkv.quant_formats import FORMATS
from localkv.quant_formats.base import split_blocks
from support.paths import MODELS
from support.program import Program

TALES = MODELS / "tales-4M-F16.gguf"


def some_moments(n: int) -> Moments:
    """Moments of correlated columns."""
    random = np.random.default_rng(n)
    mixed = np.eye(n) + 0.2 * random.standard_normal((n, n))
    x = random.standard_normal((4 * n, n)) @ mixed
    return Moments.of_mean(x.T @ x / len(x))


def cost(name: str, rows: np.ndarray, x: np.ndarray, moments: Moments) -> np.ndarray:
    """tr(E H E^T) of each row."""
    fmt = FORMATS[name]
    error = fmt.codec.decode(split_blocks(fmt, rows)).reshape(x.shape) - x.astype(np.float64)
    return np.einsum("ij,jk,ik->i", error, moments.second, error)


@pytest.mark.parametrize("name", TYPES)
def test_codes_are_where_the_layout_says(name: str) -> None:
    fmt, random = FORMATS[name], np.random.default_rng(5)
    layout = code_layout(fmt)
    x = random.standard_normal((16, fmt.block_size)).astype(np.float32)
    blocks = encode_rows(fmt, x, np.ones(fmt.block_size, np.float32))
    codes = layout.codes(blocks)
    np.testing.assert_array_equal(layout.with_codes(blocks, codes), blocks)
    other = random.integers(0, 1 << layout.bits.shape[1], codes.shape)
    changed = layout.with_codes(blocks, other)
    np.testing.assert_array_equal(layout.codes(changed), other)
    mask = layout.with_all(np.zeros_like(blocks[:1]), (1 << layout.bits.shape[1]) - 1)
    np.testing.assert_array_equal(changed & ~mask, blocks & ~mask)  # scales stay


def naive(name: str, x: np.ndarray, importance: np.ndarray, moments: Moments) -> np.ndarray:
    """Values after feedback, one by one in float64: the nearest that a code stands for."""
    fmt = FORMATS[name]
    layout, size = code_layout(fmt), fmt.block_size
    left, found = x.astype(np.float64), np.empty(x.shape)
    factor = moments.factor.astype(np.float64)
    for start in range(0, x.shape[1], size):
        block = np.ascontiguousarray(left[:, start : start + size], np.float32)
        encoded = encode_rows(fmt, block, importance[start : start + size])
        n_codes = 1 << layout.bits.shape[1]
        levels = np.stack([decoded(fmt, layout.with_all(encoded, k)) for k in range(n_codes)])
        for row in range(len(x)):
            for j in range(size):
                at, choices = start + j, levels[:, row, j].astype(np.float64)
                found[row, at] = choices[np.abs(choices - left[row, at]).argmin()]
                error = (left[row, at] - found[row, at]) / factor[at, at]
                left[row, at:] -= error * factor[at, at:]
    return found


@pytest.mark.parametrize("name", ["q4_0", "q5_1", "iq4_nl", "q3_K"])
def test_codes_are_the_plain_loops(name: str) -> None:
    fmt, n = FORMATS[name], 256
    x = np.random.default_rng(7).standard_normal((16, n)).astype(np.float32)
    moments = some_moments(n)
    rows = encode_with_feedback(fmt, x, moments.importance, moments)
    values = fmt.codec.decode(split_blocks(fmt, rows)).reshape(x.shape)
    plain = naive(name, x, moments.importance, moments)
    # a tie that float32 decides otherwise moves the rest of its row
    same = [np.abs(a - b).max() < 1e-5 for a, b in zip(values, plain, strict=True)]
    assert sum(same) >= 14


@pytest.mark.parametrize("name", TYPES)
def test_errors_cost_less(name: str) -> None:
    x = np.random.default_rng(3).standard_normal((24, 256)).astype(np.float32)
    moments = some_moments(256)
    plain = encode_rows(FORMATS[name], x, moments.importance)
    rows = encode_with_feedback(FORMATS[name], x, moments.importance, moments)
    before, after = (cost(name, one, x, moments) for one in (plain, rows))
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.8 * before.sum()


def test_columns_that_do_not_depend_on_each_other_are_rounded_alone() -> None:
    x = np.random.default_rng(4).standard_normal((16, 64)).astype(np.float32)
    moments = Moments.of_mean(np.diag(np.arange(1.0, 65.0)))
    importance = np.ones(64, np.float32)
    rows = encode_with_feedback(FORMATS["q5_0"], x, importance, moments)
    assert (
        cost("q5_0", rows, x, moments)
        <= 1.0001 * cost("q5_0", encode_rows(FORMATS["q5_0"], x, importance), x, moments)
    ).all()


def test_the_factor_is_of_the_damped_inverse() -> None:
    moments = some_moments(32)
    damped = moments.second + DAMPING * np.trace(moments.second) / 32 * np.eye(32)
    np.testing.assert_allclose(moments.factor.T @ moments.factor @ damped, np.eye(32), atol=1e-4)
    assert not np.tril(moments.factor, -1).any()
    nothing = Moments.of_mean(np.zeros((32, 32)))
    assert np.isfinite(nothing.factor).all()


def test_layers_are_measured_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "blk.1.ffn_down.weight"
    with LLM(TALES, n_ctx=256, device="cpu") as llm:
        chunks = text_chunks(llm.tokenize(calibration_text()), 256, bos_id=None, limit=1)
        width = llm.gguf.tensors[name].shape[-1]
        model = llm.engine.model
        whole = TextMoments(model, chunks, llm.cache, {name: width}).of(name)
        monkeypatch.setattr("localkv.quality.activations.MOMENT_BYTES", 1)
        parts = TextMoments(model, chunks, llm.cache, {name: width, "output.weight": 8})
        alone = parts.of(name)
        assert whole is not None
        assert alone is not None
        np.testing.assert_array_equal(whole.second, alone.second)
        assert parts.of("output.weight") is None


def test_first_tokens_of_chunks_have_a_share_of_their_own() -> None:
    name, rows = "blk.0.attn_q.weight", list[np.ndarray]()

    def on_rows(met: Met, part: int, x: np.ndarray) -> None:
        if name in met.names:
            rows.append(x.astype(np.float64))

    with LLM(TALES, n_ctx=32, device="cpu") as llm:
        chunks = text_chunks(llm.tokenize(calibration_text()), 32, bos_id=None, limit=3)
        width = llm.gguf.tensors[name].shape[-1]
        found = TextMoments(llm.engine.model, chunks, llm.cache, {name: width}).of(name)
        for _ in read_chunks(llm.engine.model, chunks, llm.cache, on_rows):
            pass
    first, others = np.stack([x[0] for x in rows]), np.concatenate([x[1:] for x in rows])
    assert found is not None
    assert len(first) == 3
    wanted = others.T @ others / len(others) + FIRST_SHARE * first.T @ first / len(first)
    np.testing.assert_allclose(found.second, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.slow
def test_a_models_predictions_move_less(program: Program, tmp_path: Path) -> None:
    text = "Once upon a time there was a little girl who had a red ball. " * 40
    klds = []
    for method in ((), ("--method", "gptq")):
        out = tmp_path / f"out{len(method)}.gguf"
        assert program("quantize", *method, TALES, out, "Q4_0").code == 0
        klds.append(divergence(out, text))
    assert klds[1] < 0.9 * klds[0]


def divergence(path: Path, text: str) -> float:
    """The mean divergence from the model before, in nats."""
    with LLM(TALES, n_ctx=256, device="cpu") as before, LLM(path, n_ctx=256, device="cpu") as after:
        chunks = text_chunks(before.tokenize(text), 256, bos_id=None, limit=2)
        logits = [
            np.concatenate([np.array(part) for part in llm.engine.logit_batches(chunk, first=16)])
            for llm in (before, after)
            for chunk in chunks
        ]
    half = len(logits) // 2
    p, q = (np.concatenate(part).astype(np.float64) for part in (logits[:half], logits[half:]))
    p, q = (
        x
        - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
        - x.max(1, keepdims=True)
        for x in (p, q)
    )
    return float((np.exp(p) * (p - q)).sum(1).mean())


def test_options_that_change_nothing_are_refused(program: Program, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    cases = [
        (("--calibration", short), "Q4_0", "give both"),
        (("--method", "gptq"), "F16", "no effect"),
        (("--method", "gptq"), "Q8_0", "no effect"),
        (("--method", "gptq", "--smooth", "0.5", "--imatrix", short), "Q4_0", "give one of them"),
        (("--method", "awq"), "Q4_0", "awq"),
        (("--method", "gptq", "--calibration", short), "Q4_0", "too few to measure with"),
        (("--method", "gptq", "--calibration", tmp_path / "none.txt"), "Q4_0", "none.txt"),
    ]
    for options, name, words in cases:
        result = program("quantize", *options, TALES, out, name)
        assert result.code != 0
        assert words in result.err
        assert not list(tmp_path.glob("*.gguf*"))
