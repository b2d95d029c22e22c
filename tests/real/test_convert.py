"""SmolLM2 as a checkpoint of transformers, and back to a GGUF file, which is quantised and run.

What quantising costs is measured on a text that the importance matrix has not seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models
from tokenizers import pre_tokenizers as steps

from localkv import LLM
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.tensor_reader import FileTensors
from localkv.quality.scores import calibration_text
from support.checkpoints import write_safetensors
from support.paths import DATA
from support.program import Program
from support.real_models import FILES

pytestmark = [pytest.mark.slow, pytest.mark.long]

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def checkpoint_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    layer = f"model.layers.{parts[1]}." if len(parts) > 1 else ""
    return f"{layer}{NAMES[parts[-1]]}.weight"


def halves(values: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of q or k as checkpoints have them: halves of a head one after the other."""
    n_rows, n_in = values.shape
    pairs = values.reshape(n_heads, n_rows // n_heads // 2, 2, n_in)
    return pairs.swapaxes(1, 2).reshape(n_rows, n_in)


def write_as_checkpoint(file: GGUFFile, folder: Path) -> None:
    """The model's values in float32, and its vocabulary as a tokenizer.json."""
    keys = file.metadata
    n_heads, n_kv = (keys.integer(f"llama.attention.head_count{end}") for end in ("", "_kv"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(keys.strings("tokenizer.ggml.tokens")),
        "hidden_size": keys.integer("llama.embedding_length"),
        "intermediate_size": keys.integer("llama.feed_forward_length"),
        "num_hidden_layers": keys.integer("llama.block_count"),
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv,
        "max_position_embeddings": keys.integer("llama.context_length"),
        "rms_norm_eps": keys.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "bos_token_id": keys.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys.integer("tokenizer.ggml.eos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors: dict[str, tuple[str, Any]] = {}
    source = FileTensors(file)
    for name, info in file.tensors.items():
        values = np.asarray(source.packed(name, info.shape).decode(), np.float32)
        if "attn_q." in name or "attn_k." in name:
            values = halves(values, n_heads if "attn_q." in name else n_kv)
        tensors[checkpoint_name(name)] = ("F32", np.ascontiguousarray(values))
    write_safetensors(folder / "model.safetensors", tensors)
    texts, types = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    merges = [tuple(pair.split(" ")) for pair in keys.strings("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    tokenizer.pre_tokenizer = steps.Sequence(
        [steps.Digits(individual_digits=True), steps.ByteLevel(add_prefix_space=False)]
    )
    special = [text for text, kind in zip(texts, types, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(keys.string("tokenizer.chat_template"))


def test_there_and_back(folder: Path, tmp_path: Path, program: Program) -> None:
    original = open_gguf(folder / FILES["smollm2"])
    checkpoint = tmp_path / "SmolLM2-135M"
    checkpoint.mkdir()
    write_as_checkpoint(original, checkpoint)
    path = tmp_path / "f32.gguf"
    done = program("convert", checkpoint, "--outtype", "f32", "-o", path)
    assert done.code == 0, done.err
    made = open_gguf(path)
    assert set(made.tensors) == set(original.tensors)
    for name, info in original.tensors.items():
        ours, theirs = (
            FileTensors(file).packed(name, info.shape).decode() for file in (made, original)
        )
        np.testing.assert_array_equal(ours, theirs, err_msg=name)
    for key in ("tokens", "token_type", "merges", "pre", "bos_token_id", "eos_token_id"):
        assert made.metadata[f"tokenizer.ggml.{key}"] == original.metadata[f"tokenizer.ggml.{key}"]
    template = "tokenizer.chat_template"
    assert made.metadata[template] == original.metadata[template]
    small = tmp_path / "q8_0.gguf"
    assert program("quantize", path, small, "Q8_0").code == 0
    texts = []
    for file in (folder / FILES["smollm2"], path, small):
        llm = LLM(file, n_ctx=512, progress=False, activations="exact")
        texts.append(llm.complete("The capital of France is", max_tokens=24, temperature=0).text)
        llm.close()
    assert texts[0] == texts[1]
    assert "Paris" in texts[2]
    check_importance(path, tmp_path, program)


BARS = {"Q4_K_M": (0.05, 0.7), "IQ3_S": (0.2, 0.3)}
"""The divergence from F32 with an importance matrix, in nats, and its share of the one without.

Measured: 0.033 and 0.50, 0.143 and 0.19. The standard error of each is 4 %.
"""


def check_importance(model: Path, folder: Path, program: Program) -> None:
    """Measure an importance matrix, quantise with and without it, and compare predictions."""
    text, matrix, base = (folder / name for name in ("text.txt", "imatrix.gguf", "base"))
    text.write_text(calibration_text())
    done = program("imatrix", "-m", model, "-f", text, "-o", matrix, "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    n_matrices = 7 * open_gguf(model).metadata.integer("llama.block_count")
    assert (facts["n_matrices"], facts["chunk_size"]) == (n_matrices, 512)
    measure = ("perplexity", "-f", DATA / "handbook.txt", "--chunks", "4", "-m")
    assert program(*measure, model, "--save-base", base).code == 0
    for name, (most, share) in BARS.items():
        klds = []
        for words in ((), ("--imatrix", matrix)):
            small = folder / "small.gguf"
            assert program("quantize", *words, model, small, name).code == 0
            found = json.loads(program(*measure, small, "--base", base, "--json").out)
            klds.append(found["results"][0]["divergence"]["kld"]["value"])
        assert klds[1] < most
        assert klds[1] < share * klds[0]
