"""Adapters on the command line: options, files that are shown, memory that is planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localkv.loader.gguf_file import open_gguf
from support.adapters import write_adapter
from support.quantize_models import write_importance


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("lora") / "story.gguf", tiny_model, size=0.5)


def test_a_file_is_shown(program, adapter: Path) -> None:
    facts = json.loads(program("show", "--json", str(adapter)).out)
    assert facts["adapter"]["ranks"] == [4]
    assert facts["adapter"]["alpha"] == 8.0
    assert "blk.0.attn_q.weight" in facts["adapter"]["tensors"]
    text = program("show", str(adapter)).out
    assert "LoRA of a model of llama" in text
    assert "rank            4, alpha 8" in text
    assert program("show", "--template", str(adapter)).code == 1


def test_plans_count_it(program, adapter: Path, tiny_model: Path) -> None:
    plain, adapted = (
        json.loads(program("plan", "--json", str(tiny_model), *more).out)
        for more in ((), ("--lora", str(adapter)))
    )
    n_bytes = json.loads(program("show", "--json", str(adapter)).out)["adapter"]["bytes"]
    assert adapted["adapters"] == n_bytes > 0 == plain["adapters"]
    assert "adapters" in program("plan", str(tiny_model), "--lora", str(adapter)).out


def test_options_reach_the_model(program, adapter: Path, tiny_model: Path) -> None:
    line = ("complete", "-m", str(tiny_model), "-p", "Once upon a time", "-n", "8", "--temp", "0")
    given = {
        "none": (),
        "one": ("--lora", str(adapter)),
        "half": ("--lora-scaled", f"{adapter}:0.5"),
        "zero": ("--lora", str(adapter), "--lora-init-without-apply"),
    }
    found = {name: program(*line, *more) for name, more in given.items()}
    assert found["none"].out == found["zero"].out
    assert len({result.out for result in found.values()}) == 3
    assert "1 adapter " in found["one"].err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--lora-scaled A", "there is no scale"),
        ("--lora-scaled A:", "there is no scale"),
        ("--lora-scaled :1", "there is no scale"),
        ("--lora-scaled A:nan", "the scale of the adapter"),
        ("--lora A,A", "is named twice"),
        ("--lora A --lora-scaled A:2", "is named twice"),
        ("--lora-init-without-apply", "has no effect without"),
        ("--lora missing.gguf", "no such file"),
        ("--lora A --device cuda", ""),
    ],
)
def test_wrong_options(program, adapter: Path, tiny_model: Path, given: str, message: str) -> None:
    words = [word.replace("A", str(adapter)) for word in given.split()]
    result = program("complete", "-m", str(tiny_model), "-p", "a", *words)
    assert result.code != 0
    assert result.err_lines[-1].startswith(("error:", "hint:"))
    assert message in result.err


def test_it_is_refused_with_a_smoothed_file(
    program, adapter: Path, tiny_model: Path, tmp_path: Path
) -> None:
    tensors = open_gguf(tiny_model).tensors.values()
    sizes, model = tmp_path / "sizes.dat", tmp_path / "smooth.gguf"
    write_importance(sizes, {x.name: x.shape[-1] for x in tensors if len(x.shape) == 2})
    made = ("quantize", "--imatrix", sizes, "--smooth", "0.5", "--allow-requantize")
    assert "smoothed: the inputs of" in program(*made, tiny_model, model, "F32").out
    result = program("complete", "-m", str(model), "-p", "Once", "-n", "1", "--lora", str(adapter))
    assert result.code != 0
    assert "a file that localkv quantize --smooth made" in result.err_lines[0]
