"""Writes llama_cpp_imatrix.json: what llama-imatrix measures, for quality/test_activations.py.

    LOCALKV_CONFORMANCE=FOLDER python make_llama_cpp_imatrix.py LLAMA_IMATRIX

LLAMA_IMATRIX is the program, of llama.cpp as llama-cpp-python 0.3.36 has it. Models are copied in
float32, and K and V are float32, so that nothing is rounded. The models of conformance data get a
vocabulary of single letters.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from localkv.loader import gguf_copy
from localkv.loader.gguf_file import open_gguf
from localkv.loader.tokenizer import tokenizer_from_metadata
from support.f32_copy import f32_copy
from support.paths import DATA, MODELS

CONFORMANCE = (
    *("archs/llama-moe", "archs/qwen2moe", "archs2/deepseek2", "archs2/deepseek2-legacy"),
    *("archs2/glm4", "archs2/qwen3next"),
)
N_CTX = 64


def with_letters(path: Path, to: Path) -> Path:
    """The model with a vocabulary in which each letter is a token."""
    model = open_gguf(path)
    n = model.tensors["token_embd.weight"].shape[0]
    texts = ["<unk>", "<s>", "</s>", "\u2581", "<0x0A>", *map(chr, range(33, 127))]
    texts += [f"zzq{i}" for i in range(len(texts), n)]
    types = [2, 3, 3, 1, 6, *[1] * (n - 5)]
    keys = gguf_copy.read_keys(path)
    added = {
        "model": gguf_copy.text("llama"),
        "tokens": gguf_copy.texts(texts),
        "scores": struct.pack(f"<IIQ{n}f", 9, 6, n, *[-float(i) for i in range(n)]),
        "token_type": struct.pack(f"<IIQ{n}i", 9, 5, n, *types),
        "bos_token_id": gguf_copy.u32(1),
        "eos_token_id": gguf_copy.u32(2),
    }
    keys |= {f"tokenizer.ggml.{key}": value for key, value in added.items()}
    tensors = [gguf_copy.NewTensor(x.name, x.shape, x.format) for x in model.tensors.values()]
    file = gguf_copy.NewFile(keys, tensors)
    with to.open("wb") as out:
        out.write(file.header())
        for tensor in tensors:
            out.write(model.data(tensor.name).tobytes())
            file.pad(out, tensor)
    return to


def measured(program: str, model: Path, text: str, folder: Path) -> dict[str, object]:
    (folder / "text.txt").write_text(text)
    out = folder / "out.gguf"
    words = [program, "-m", str(model), "-f", str(folder / "text.txt"), "-o", str(out)]
    words += ["--chunks", "2", "-c", str(N_CTX), "-b", str(N_CTX), "-ctk", "f32", "-ctv", "f32"]
    words += ["-fa", "off", "--no-ppl", "--process-output"]
    subprocess.run(words, check=True, capture_output=True)
    tokenizer = tokenizer_from_metadata(open_gguf(model).metadata)
    ids = tokenizer.encode(text, add_special=True)[: 2 * N_CTX]
    for i in (0, N_CTX):
        if tokenizer.add_bos:
            ids[i] = tokenizer.bos_id
    reader = gguf.GGUFReader(out)
    found = dict[str, dict[str, list[float]]]()
    for tensor in reader.tensors:
        name, _, kind = tensor.name.rpartition(".")
        values = np.asarray(tensor.data).reshape(-1)
        if kind == "in_sum2":
            values = np.array([values.sum(dtype=np.float64), *values[:: max(1, len(values) // 6)]])
        found.setdefault(name, {})[kind] = [float(f"{x:.8g}") for x in values]
    return {"ids": ids, "tensors": found}


def main() -> None:
    program, text = sys.argv[1], (DATA / "handbook.txt").read_text()
    letters = "".join(c if 32 <= ord(c) < 127 else " " for c in text[:4000])
    stories = json.loads((DATA / "llama_cpp_perplexity.json").read_text())["text"]
    found = dict[str, dict[str, object]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tales = f32_copy(MODELS / "tales-4M-F16.gguf", folder / "tales.gguf")
        found["tales"] = measured(program, tales, stories, folder)
        for model in CONFORMANCE:
            path = Path(os.environ["LOCALKV_CONFORMANCE"]) / f"{model}.gguf"
            copied = f32_copy(with_letters(path, folder / "a.gguf"), folder / "b.gguf")
            found[model] = measured(program, copied, letters, folder)
    (DATA / "llama_cpp_imatrix.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
