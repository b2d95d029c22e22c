"""Conversions of small checkpoints, compared with llama.cpp's files and transformers' logits."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from localkv.conversion.convert import plan_conversion
from localkv.errors import LocalKVError, ModelFileError
from localkv.kernels.reference.backend import reference_backend
from localkv.loader.gguf_file import open_gguf
from support.checkpoints import PUBLISHED, TEMPLATE, cases, write_checkpoint
from support.conversions import IDS, N_LOGITS, digest
from support.forward import logits, nmse

CASES = cases()
ROUNDED = ("rope_freqs.weight", ".ssm_a")
"""Tensors that are computed in float32 there: the last bit may differ."""
OWN_KEYS = {
    # GGUF's name of the same pre-tokenizer that fits the architecture better
    "olmo": {"tokenizer.ggml.pre"},
    "lfm2": {"tokenizer.ggml.pre"},
    # an id that llama.cpp's converter gives whatever token it is
    "gemma": {"tokenizer.ggml.eot_token_id"},
    # transformers doesn't save that experts are chosen by sigmoids, always
    "deepseek3": {"deepseek2.expert_gating_func"},
}


def convert(name: str, folder: Path, outtype: str = "auto") -> Path:
    plan = plan_conversion(write_checkpoint(folder / "tiny", CASES[name]), outtype)
    path = folder / "made.gguf"
    plan.write(path)
    return path


@pytest.mark.parametrize("name", CASES)
def test_equal_to_llama_cpp(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    decodes = "quantization_config" in case["config"] and name != "gpt-oss-mxfp4"
    outtype = {1: "f16", 32: "bf16"}[case["keys"]["general.file_type"]] if decodes else "auto"
    reader = gguf.GGUFReader(convert(name, tmp_path, outtype))
    keys = {
        key: digest(field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    differ = {key for key in keys | case["keys"] if keys.get(key) != case["keys"].get(key)}
    assert differ == OWN_KEYS.get(name, set()) & differ
    made = {
        tensor.name: [
            tensor.tensor_type.name,
            [int(n) for n in reversed(tensor.shape)],
            hashlib.sha256(tensor.data.tobytes()).hexdigest()[:12],
        ]
        for tensor in reader.tensors
    }
    for tensor in [name for name in made if name.endswith(ROUNDED)]:
        made[tensor][2] = case["file"][tensor][2]
    assert made == case["file"]


RUN = (
    "llama-3.1 llama-yarn ministral3 mixtral qwen2moe qwen3next qwen35moe gemma3 phi3-long granite"
    " olmo3 glm4moe gpt-oss deepseek3 lfm2moe"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN.split())
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    want = np.frombuffer(base64.b64decode(CASES[name]["logits"]), np.float32)
    got = logits(open_gguf(convert(name, tmp_path, "f32")), reference_backend(), IDS, "f32")
    # LongRoPE is by the cache's length here; gpt-oss's YaRN is rounded to whole channels
    bound = {"phi3-long": 0.02, "gpt-oss": 1e-3}.get(name, 1e-8)
    assert nmse(got[-1, :N_LOGITS], want) <= bound


@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
def test_types_of_weights(outtype: str, tmp_path: Path) -> None:
    file = open_gguf(convert("qwen2", tmp_path, outtype))
    for name, info in file.tensors.items():
        is_matrix = len(info.shape) > 1
        assert info.format.name == (outtype if is_matrix else "f32"), name
    assert file.metadata.integer("general.file_type") == {"f32": 0, "f16": 1, "q8_0": 7}[outtype]


@pytest.mark.parametrize("name", PUBLISHED)
def test_pre_tokenizers_are_recognised(name: str, tmp_path: Path) -> None:
    """By what they do: the same cuts may have several names."""
    tokenizer = {"kind": "bpe", "pre": name, "adds": "", "nfc": False, "specials": {"eos": "<|e|>"}}
    case = CASES["qwen2"] | {"tokenizer": tokenizer}
    plan = plan_conversion(write_checkpoint(tmp_path / "tiny", case))
    value = plan.writer.kv_data[0]["tokenizer.ggml.pre"].value
    assert value == {"glm4": "llama-bpe"}.get(name, name)


def test_a_template_needs_no_settings_beside_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["qwen3"])
    (folder / "tokenizer_config.json").unlink()
    keys = plan_conversion(folder).writer.kv_data[0]
    assert keys["tokenizer.chat_template"].value == TEMPLATE


def changed(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["qwen3"])

    def error(**values: Any) -> str:
        before = (folder / "config.json").read_text()
        changed(folder, **values)
        with pytest.raises(LocalKVError) as caught:
            plan_conversion(folder)
        (folder / "config.json").write_text(before)
        return caught.value.message

    assert "'NewForCausalLM' can't be converted" in error(architectures=["NewForCausalLM"])
    assert "no 'architectures'" in error(architectures=None)
    assert "missing 'num_hidden_layers'" in error(num_hidden_layers=None)
    assert "expected an integer" in error(hidden_size="many")
    assert "3 blocks" in error(num_hidden_layers=3) or "blocks" in error(num_hidden_layers=3)
    assert "blk.0" in error(intermediate_size=95)
    assert "a vocabulary of 10" in error(vocab_size=10)
    assert "RoPE scaling 'spiral'" in error(rope_parameters={"rope_type": "spiral"})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="has no tokenizer"):
        plan_conversion(folder)


def test_a_tokenizer_that_files_cannot_express_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["qwen2"])
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    values["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[aeiou]"
    path.write_text(json.dumps(values))
    with pytest.raises(ModelFileError, match=r"no pre-tokenizer of llama\.cpp's cuts texts as"):
        plan_conversion(folder)
    values = json.loads((write_checkpoint(tmp_path / "b", CASES["qwen2"]) / path.name).read_text())
    values["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(values))
    with pytest.raises(ModelFileError, match="has other tokens in a GGUF file"):
        plan_conversion(folder)


def test_a_value_beyond_a_type_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", CASES["qwen3"])
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = next(n for n, entry in header.items() if "embed" in n)
    offset = start + header[name]["data_offsets"][0]
    data[offset : offset + 2] = (0x7F00).to_bytes(2, "little")  # 1.7e38
    file.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"token_embd.weight.*range of F16"):
        plan_conversion(folder, "f16").write(tmp_path / "made.gguf")
    assert not list(tmp_path.glob("*.gguf"))
    plan_conversion(folder, "bf16").write(tmp_path / "made.gguf")
