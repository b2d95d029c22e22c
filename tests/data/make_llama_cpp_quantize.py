"""Writes llama_cpp_quantize.json: what llama-quantize makes, for loader/test_quantize.py and
quant_formats/test_quantize.py.

    python make_llama_cpp_quantize.py FOLDER

FOLDER holds llama-quantize and the libggml-base.so that it was linked with (version 0.3.36 of
llama-cpp-python has the sources). The file holds SHA-256 of the rows of each type, with and without
importance. It also has that of tales-4M in each type of files, and of the types that each type of
files has for the tensors of some shapes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from localkv.loader.gguf_file import open_gguf
from localkv.loader.quantised_format import FILE_TYPES
from localkv.quant_formats import WEIGHT_FORMATS
from support.paths import MODELS
from support.quantize_models import N_IN, SHAPES, Shape, importance, weights_for, write_importance

NEEDS_IMPORTANCE = ("iq2_xxs", "iq2_xs", "iq1_s")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def types(folder: Path) -> dict[str, dict[str, str]]:
    """The digests of the rows of each type."""
    library = ctypes.CDLL(str(folder / "libggml-base.so"))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        pointer,
        pointer,
        size,
        size,
        size,
        pointer,
    ]
    found = dict[str, dict[str, str]]()
    for fmt in WEIGHT_FORMATS.values():
        x = weights_for(fmt.name)
        for key, columns in (("plain", None), ("weighted", importance(N_IN))):
            if columns is None and fmt.name in NEEDS_IMPORTANCE:
                continue
            out = np.zeros(len(x) * fmt.row_bytes(N_IN), np.uint8)
            at = None if columns is None else columns.ctypes.data
            library.ggml_quantize_chunk(
                fmt.ggml_type, x.ctypes.data, out.ctypes.data, 0, len(x), N_IN, at
            )
            found.setdefault(fmt.name, {})[key] = digest(out.tobytes())
    return found


def files(program: Path, folder: Path) -> dict[str, dict[str, str]]:
    """The digest of a model in each type of files."""
    model = MODELS / "tales-4M-F16.gguf"
    tensors = open_gguf(model).tensors.values()
    columns = {x.name: x.shape[-1] for x in tensors if len(x.shape) == 2}
    write_importance(folder / "tales.dat", columns)
    found: dict[str, dict[str, str]] = {}
    for name in FILE_TYPES:
        for key, options in (("plain", []), ("weighted", ["--imatrix", "tales.dat"])):
            words = [program, *options, model, folder / "out.gguf", name, "2"]
            done = subprocess.run(words, capture_output=True, cwd=folder, check=False)
            if done.returncode == 0:
                data = (folder / "out.gguf").read_bytes()
                found.setdefault(name, {})[key] = digest(data)
    return found


def write_header(path: Path, shape: Shape) -> None:
    """A file with holes for tensors."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(2 * shape.n_embd)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    if shape.n_experts:
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(2)
    n_bytes = 0
    for name, size in shape.tensors():
        info = np.float32 if len(size) == 1 else np.float16
        n = int(np.prod(size)) * np.dtype(info).itemsize
        writer.add_tensor_info(name, size, np.dtype(info), n)
        n_bytes += n + 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + n_bytes + 32)


def mixtures(program: Path, folder: Path) -> dict[str, dict[str, dict[str, str]]]:
    """The digests of the types of a shape's tensors, by name."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for shape_name, shape in SHAPES.items():
        path = folder / "shape.gguf"
        write_header(path, shape)
        columns = {
            name: size[-1] * (size[0] if len(size) == 3 else 1)
            for name, size in shape.tensors()
            if len(size) > 1
        }
        write_importance(folder / "shape.dat", columns)
        for name in FILE_TYPES:
            for key, options in (("plain", []), ("weighted", ["--imatrix", "shape.dat"])):
                words = [program, *options, "--dry-run", path, name, "2"]
                done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
                if done.returncode:
                    continue
                lines = re.findall(
                    r"\] +(\S+) +- \[.*type = +(\w+), .*?(?:\((\w+)\))?$",
                    done.stdout + done.stderr,
                    re.MULTILINE,
                )
                assert len(lines) == len(list(shape.tensors())), done.stderr
                chosen = sorted(f"{tensor} {new or old}" for tensor, old, new in lines)
                by_type = found.setdefault(shape_name, {}).setdefault(name, {})
                by_type[key] = digest("\n".join(chosen).encode())
    return found


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    program = folder / "llama-quantize"
    with tempfile.TemporaryDirectory() as temporary:
        fixture = {
            "llama_cpp_python": "0.3.36",
            "types": types(folder),
            "files": files(program, Path(temporary)),
            "mixtures": mixtures(program, Path(temporary)),
        }
    path = Path(__file__).with_name("llama_cpp_quantize.json")
    path.write_text(json.dumps(fixture, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
