"""Numbers in a model file that no real file holds: each is an answer or one line of error."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localkv.errors import LocalKVError, ModelFileError
from localkv.loader.gguf_file import open_gguf
from localkv.loader.metadata import OF_MODELS, Metadata, range_of
from localkv.loader.model_header import model_spec
from localkv.loader.vocabulary import read_vocabulary
from support.attack.extreme_values import KINDS, Change, base_model, sampled, take_apart
from support.attack.limited_child import forget_peak, limit_growth, peak_bytes, run_limited
from support.program import Program
from support.tiny_model import write_tiny_model

SAMPLE = 40
"""Changes of each kind of file in the fast part; the long part tries all of them."""

SECONDS, REFUSED_SECONDS = 20.0, 1.0
"""What one file may take: kernels are compiled for some that can be used."""

USED_BYTES, REFUSED_BYTES = 1 << 29, 64 << 20
"""Memory beside what there was before."""


def use(path: Path, kind: str) -> None:
    """Everything that reads a header, and some steps of the model; their results are numbers."""
    from localkv.commands.show import describe, lines
    from localkv.llm import LLM

    gguf = open_gguf(path)
    json.dumps(describe(gguf), allow_nan=False)
    assert all(line.isprintable() for line in lines(gguf))
    llm = LLM(path, n_ctx=16)
    assert np.isfinite(llm.logits([1, 2, 3])).all()
    if kind == "text":
        ids = llm.tokenize("Once upon a <|user|> time é", parse_special=True)
        llm.detokenize(ids)
        answer = llm.chat([{"role": "user", "content": "fox"}], max_tokens=2, temperature=0)
        assert answer.completion.usage.completion_tokens >= 0


def try_all(kind: str, folder: str, count: int | None) -> None:
    """Print how many files were used and refused."""
    base = base_model(kind, Path(folder))
    use(base, kind)  # compiles kernels, imports all that is needed
    content, target = take_apart(base), Path(folder) / "changed.gguf"
    limit_growth(2 << 30)
    used, refused = 0, 0
    for change in sampled(kind, content, count):
        target.write_bytes(content.with_change(change))
        before, started = forget_peak(), time.process_time()
        seconds, n_bytes = SECONDS, USED_BYTES
        try:
            use(target, kind)
            used += 1
        except LocalKVError as error:
            if not str(error).isprintable():
                raise AssertionError(f"{change}: not one line: {error}") from error
            refused += 1
            seconds, n_bytes = REFUSED_SECONDS, REFUSED_BYTES
        except BaseException as error:
            raise AssertionError(f"{change}: {type(error).__name__}: {error}") from error
        took, grown = time.process_time() - started, peak_bytes() - before
        assert took < seconds, f"{change} took {took:.1f} s"
        assert grown < n_bytes, f"{change} took {grown >> 20} MiB"
    print(used, refused)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_some_extreme_numbers(kind: str, tmp_path: Path) -> None:
    printed = run_limited(
        "test_model_values", f"try_all({kind!r}, {str(tmp_path)!r}, {SAMPLE})", seconds=200
    )
    used, refused = map(int, printed.split())
    assert used + refused == SAMPLE
    assert used
    assert refused > SAMPLE // 5


@pytest.mark.attack
@pytest.mark.parametrize("kind", KINDS)
def test_every_extreme_number(kind: str, tmp_path: Path) -> None:
    printed = run_limited(
        "test_model_values", f"try_all({kind!r}, {str(tmp_path)!r}, None)", seconds=500
    )
    used, refused = map(int, printed.split())
    assert used + refused > 500
    assert used > 50


class _Recorded(Metadata):
    """Remembers the numbers that are asked for."""

    def __init__(self, values: Metadata) -> None:
        super().__init__(dict(values))
        self.asked: set[str] = set()

    def _in_range(self, key: str, value: object) -> object:
        self.asked.add(key)
        return super()._in_range(key, value)

    def _all_in_range(self, key: str, values: object) -> object:
        self.asked.add(key)
        return super()._all_in_range(key, values)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_that_is_read_has_a_range(kind: str, tmp_path: Path) -> None:
    gguf = open_gguf(base_model(kind, tmp_path))
    recorded = _Recorded(gguf.metadata)
    model_spec(replace(gguf, metadata=recorded))
    if kind == "text":
        read_vocabulary(recorded)
    assert len(recorded.asked) > 10
    unlimited = range_of("a.key.of.nobody")
    assert [key for key in recorded.asked if range_of(key) == unlimited] == []


@pytest.mark.parametrize(
    ("key", "value_type", "value"),
    [
        ("llama.rope.scaling.yarn_beta_fast", 12, 1e-320),
        ("llama.rope.freq_base", 12, float("nan")),
        ("llama.attention.layer_norm_rms_epsilon", 12, 1e300),
        ("llama.context_length", 10, 2**63),
        ("tokenizer.ggml.scores", 12, 1e300),
        ("tokenizer.ggml.token_type", 11, 2**62),
    ],
)
def test_what_is_said(key: str, value_type: int, value: float, tmp_path: Path) -> None:
    """The key, the value and what is allowed, in one line."""
    path = tmp_path / "changed.gguf"
    content = take_apart(write_tiny_model(tmp_path / "tiny.gguf"))
    path.write_bytes(content.with_change(Change(key, value_type, value)))
    opened = open_gguf(path)
    read = model_spec if key.startswith("llama.") else read_vocabulary
    with pytest.raises(ModelFileError) as caught:
        read(opened if read is model_spec else opened.metadata)
    message = str(caught.value)
    assert "\n" not in message
    assert f"key '{key}' is {value}" in message
    assert message.endswith(f"expected {range_of(key)}")


def test_ranges_hold_what_real_models_have() -> None:
    real = {
        "context_length": (512, 131_072, 10_485_760),
        "embedding_length": (64, 8192, 16_384),
        "expert_count": (0, 8, 512),
        "attention.layer_norm_rms_epsilon": (1e-6, 1e-5, 1e-12),
        "rope.freq_base": (10_000.0, 500_000.0, 1e8, 1e10),
        "rope.scaling.factor": (0.0, 0.25, 1.0, 40.0, 128.0),
        "rope.scaling.yarn_beta_fast": (32.0, 1.0),
        "rope.scaling.yarn_log_multiplier": (0.0707, 0.1, 1.0),
        "rope.scaling.yarn_ext_factor": (-1.0, 0.0, 1.0),
    }
    for key, values in real.items():
        assert all(OF_MODELS[key].holds(value) for value in values), key


def test_a_special_id_that_is_no_token_is_spoken_of(tmp_path: Path) -> None:
    content = take_apart(write_tiny_model(tmp_path / "tiny.gguf"))
    path = tmp_path / "changed.gguf"
    key = "tokenizer.ggml.bos_token_id"
    for token, said in ((10**6, True), (2**32 - 1, False), (1, False)):
        path.write_bytes(content.with_change(Change(key, 10, token)))
        lines = read_vocabulary(open_gguf(path).metadata).warnings
        assert any(f"bos_token_id is {token}, " in line for line in lines) == said


@pytest.mark.parametrize("command", ["complete -p hi", "plan", "bench", "show"])
def test_every_command_says_what_tensors_lack(
    command: str, program: Program, tmp_path: Path
) -> None:
    """An embedding of 2^24, as the keys have it, is nothing to plan or to load."""
    path = tmp_path / "changed.gguf"
    content = take_apart(write_tiny_model(tmp_path / "tiny.gguf"))
    path.write_bytes(content.with_change(Change("llama.embedding_length", 4, 1 << 24)))
    result = program(*command.split(), "-m", path)
    assert result.code == (command != "show")
    assert "tensor 'token_embd.weight' has shape [" in result.out + result.err
