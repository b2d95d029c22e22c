"""`localkv show`, and the arithmetic of `memory_plan` behind it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from localkv.cache.layout import fits_head, kv_bytes_per_token
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.memory.plan import weights_by_type
from localkv.quant_formats import KV_FORMATS
from support import tiny_model as tiny
from support.dense_variants import dense_variant
from support.program import Program


def lines_of(text: str) -> dict[str, str]:
    """The first table: label -> value."""
    rows = text.split("\n\n")[0].splitlines()
    return {row[:16].strip(): row[16:] for row in rows}


def write(path: Path, **strings: str) -> Path:
    """A GGUF file with these metadata and one small tensor."""
    writer = gguf.GGUFWriter(path, strings.pop("architecture"))
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    writer.add_tensor("x.weight", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_whole_model(program: Program, tiny_model: Path) -> None:
    result = program("show", tiny_model)
    assert (result.code, result.err) == (0, "")
    facts = lines_of(result.out)
    assert facts["name"] == "tiny"
    assert facts["architecture"] == "llama"
    assert facts["heads"] == "2, 1 for K and V, of 64"
    assert facts["context"] == "256 tokens"
    assert facts["tokenizer"].startswith("llama, pre-tokenizer default, ")
    assert facts["special tokens"] == "bos 1 <s>, eos 2 </s>, unknown 0 <unk>"
    assert facts["added to texts"] == "bos"
    assert facts["chat template"] == "default"
    for name in KV_FORMATS:
        assert f"\n{name} " in result.out
    assert "Tails and sinks are kept in pages" in result.out


def test_json_agrees_with_the_arithmetic(program: Program, tiny_model: Path) -> None:
    result = program("show", "-m", tiny_model, "--json")
    facts = json.loads(result.out)
    assert result.out.count("\n") == 1
    gguf_file = open_gguf(tiny_model)
    config = model_spec(gguf_file)
    assert facts["file_bytes"] == tiny_model.stat().st_size
    assert sum(share["n_bytes"] for share in facts["weights"]) == gguf_file.n_bytes
    assert sum(share["n_values"] for share in facts["weights"]) == facts["n_parameters"]
    assert {share["name"]: share["n_tensors"] for share in facts["weights"]} == {
        "f16": 16,
        "f32": 5,
    }
    assert facts["model"]["n_layers"] == config.n_layers
    assert [row["type"] for row in facts["kv_cache"]] == list(KV_FORMATS)
    for row in facts["kv_cache"]:
        per_token = kv_bytes_per_token(row["type"], row["type"], config)
        assert row["bytes_per_token"] == per_token == 2 * row["bytes_per_token_k"]
        fmt = KV_FORMATS[row["type"]]
        bits, group = fmt.bits_per_value(64), fmt.group_tokens
        sink = 4 if bits < 4 or (group > 1 and bits <= 5) else 0
        packed = (256 - sink) // group * group
        # of 64 newest tokens the first may be any of those that are packed with it
        tail = 256 - sink - (256 - sink - 64) // group * group if group > 1 else 0
        exact = (sink + tail) * 2 * 2 * 2 * 64  # f16, both sides, layers, channels
        assert row["bytes_as_f16"] == exact
        assert row["bytes_full_context"] == packed * per_token + exact


def test_kv_bytes_are_what_the_cache_allocates(tiny_model: Path) -> None:
    from localkv.cache.layout import SegmentSpec, cache_bytes, uniform_layouts

    config = model_spec(open_gguf(tiny_model))
    sizes = {"n_layers": 2, "n_kv_heads": 1, "head_dim": 64}
    for type_k in KV_FORMATS:
        for type_v in KV_FORMATS:
            layouts = uniform_layouts(**sizes, segments=[SegmentSpec(type_k, type_v)])
            allocated = sum(cache_bytes(layouts, n_ctx=512))
            assert 512 * kv_bytes_per_token(type_k, type_v, config) == allocated


def test_f16_takes_two_bytes_a_value(tiny_model: Path) -> None:
    config = model_spec(open_gguf(tiny_model))
    values = tiny.N_LAYERS * tiny.N_KV_HEADS * tiny.HEAD_DIM
    assert kv_bytes_per_token("f16", "f32", config) == values * (2 + 4)


def test_types_that_do_not_divide_the_head_are_said(program: Program, conformance: Path) -> None:
    path = conformance / "archs" / "llama-hd80.gguf"
    config = model_spec(open_gguf(path))
    for name, fmt in KV_FORMATS.items():
        assert fits_head(name, config) == (80 % fmt.block_size == 0)
        row = next(r for r in program("show", path).out.splitlines() if r.startswith(f"{name} "))
        assert ("does not fit" in row) != fits_head(name, config)


def test_weights_by_type_puts_the_largest_first(tiny_model: Path) -> None:
    shares = weights_by_type(open_gguf(tiny_model).tensors.values())
    assert [share.name for share in shares] == ["f16", "f32"]
    assert weights_by_type([]) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("phi3-long", "32 channels, base 10000, LongRoPE: other factors with -c above 256"),
        ("apertus", "64 channels, base 10000, factors of the file"),
        ("olmo", "64 channels, base 10000"),
    ],
)
def test_factors_of_rope(program: Program, name: str, said: str, tmp_path: Path) -> None:
    path = dense_variant(name).write(tmp_path / "model.gguf")
    lines = program("show", path).out.splitlines()
    assert f"rope            {said}" in lines


def test_a_model_without_a_tokenizer(program: Program, tmp_path: Path) -> None:
    path = tiny.write_tiny_model(tmp_path / "m.gguf", tokenizer=False)
    result = program("show", path)
    assert result.code == 0
    assert lines_of(result.out)["tokenizer"] == "none: the model runs on token ids only"
    assert json.loads(program("show", path, "--json").out)["tokenizer"] is None


def test_a_vocabulary(program: Program, tmp_path: Path) -> None:
    result = program("show", tiny.write_vocabulary(tmp_path / "v.gguf"))
    assert result.code == 0
    facts = lines_of(result.out)
    assert facts["model"] == "none: the file holds a vocabulary only"
    assert facts["added to texts"] == "bos"
    assert facts["chat template"] == "none"


def test_an_architecture_that_can_not_be_run(program: Program, tmp_path: Path) -> None:
    result = program("show", write(tmp_path / "m.gguf", architecture="mamba"))
    assert result.code == 0
    facts = lines_of(result.out)
    assert facts["architecture"] == "mamba"
    assert facts["model"].startswith("can't be run: ")
    assert "'mamba' is not supported" in facts["model"]


def test_a_tokenizer_that_can_not_be_used(program: Program, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", architecture="llama", tokenizer__ggml__model="rwkv")
    result = program("show", path)
    assert result.code == 0
    assert "can't be used: tokenizer of kind 'rwkv' is not supported" in result.out


def test_metadata_can_not_steer_the_terminal(program: Program, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", architecture="llama", general__name="a\x1b[2J\nb")
    assert lines_of(program("show", path).out)["name"] == "a\\x1b[2J b"


def test_template(program: Program, tiny_model: Path, tmp_path: Path) -> None:
    assert program("show", tiny_model, "--template").out == tiny.TEMPLATE + "\n"
    program.setenv(LOCALKV_CHAT_TEMPLATE="chatml", LLAMA_ARG_CHAT_TEMPLATE="chatml")
    assert program("show", tiny_model, "--chat-template").out == tiny.TEMPLATE + "\n"
    assert program("show", tiny_model).out.startswith("file")
    path = tiny.write_tiny_model(tmp_path / "m.gguf", template=False)
    result = program("show", path, "--template")
    assert (result.code, result.out) == (1, "")
    assert result.err == f"error: {path}: there is no chat template\n"


def test_model_by_argument_option_or_variable(program: Program, tiny_model: Path) -> None:
    expected = program("show", tiny_model).out
    assert program("show", "-m", tiny_model).out == expected
    program.setenv(LOCALKV_MODEL=str(tiny_model))
    assert program("show").out == expected
    assert program("show", str(tiny_model.parent), "-m", tiny_model).err == (
        "error: two models: give FILE or -m FILE\n"
    )
    assert program("show", "no.gguf").err == "error: no.gguf: no such file\n"
    result = program("show", "a.gguf", "-m", "b.gguf")
    assert (result.code, result.err) == (
        2,
        "error: -m/--model is given 2 times: a.gguf and b.gguf\n"
        "hint: a word that ends in .gguf counts as -m\n",
    )


def test_a_file_that_is_no_model(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"not a model")
    result = program("show", path)
    assert (result.code, result.out) == (1, "")
    assert len(result.err_lines) == 1
    assert result.err.startswith("error: ")


@pytest.mark.parametrize("part", [1, 2])
def test_any_part_of_a_split_model(program: Program, tmp_path: Path, part: int) -> None:
    for number in (1, 2):
        writer = gguf.GGUFWriter(tmp_path / f"m-0000{number}-of-00002.gguf", "llama")
        writer.add_uint16("split.no", number - 1)
        writer.add_uint16("split.count", 2)
        writer.add_tensor(f"t{number}.weight", np.zeros((1, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    result = program("show", tmp_path / f"m-0000{part}-of-00002.gguf")
    assert "in 2 parts" in lines_of(result.out)["size"]
    assert "\nf32            2 " in result.out
