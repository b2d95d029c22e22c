"""Writes llama_cpp_iq4_nl.json: what llama.cpp packs as iq4_nl, for quant_formats/test_encode.py.

    pip install llama-cpp-python==0.3.36
    python make_llama_cpp_iq4_nl.py

gguf-py can't quantise to this type. The values are made from integers, so that the test can make
them again (`values`, below, is there too). The file holds the numbers of the blocks and, in base64,
18 bytes of each. Of very many blocks it has the first few. It also has all whose scale is close to
the middle between two halves: there the scale depends on the order of its sums.
"""

from __future__ import annotations

import base64
import ctypes
import json
from pathlib import Path

import llama_cpp
import numpy as np

N_FIRST = 800
N_SEARCHED = 400_000
CODEBOOK = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def values(blocks: np.ndarray) -> np.ndarray:
    """Float32 [n_blocks, 32]: nearly Gaussian, of many magnitudes, every third with an outlier.

    The first 15 blocks hold the multiples of a half up to 116, in units of the scale.
    """
    i = (32 * blocks[:, None] + np.arange(1, 33)).astype(np.uint64)
    i *= np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    i = (i ^ (i >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    i = (i ^ (i >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    sums = i.view(np.uint16).reshape(-1, 32, 4).astype(np.int32).sum(-1) - 131070
    x = sums.astype(np.float32) * np.float32(2.0**-15)
    x[np.arange(len(x)), blocks % 32] *= np.where(blocks % 3 == 0, 8, 1)
    x *= np.exp2(blocks % 35 - 17)[:, None]
    ties = blocks[blocks < 15]
    x[blocks < 15, 0] = -127
    x[blocks < 15, 1:] = (31 * ties[:, None] + np.arange(31) - 231) / 2
    return x.astype(np.float32)


def quantize(x: np.ndarray) -> np.ndarray:
    """llama.cpp's packed blocks: float32 [n_blocks, 32] -> uint8 [n_blocks, 18]."""
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    packed = np.zeros((len(x), 18), np.uint8)
    pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in (x, packed))
    library.quantize_row_iq4_nl_ref.restype = None
    library.quantize_row_iq4_nl_ref(*pointers, ctypes.c_int64(x.size))
    return packed


def depends_on_order(x: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """Blocks whose scale would be another half if the sums were exact: bool [n_blocks]."""
    codes = np.concatenate([packed[:, 2:] & 15, packed[:, 2:] >> 4], axis=1)
    x, q = x.astype(np.float64), np.array(CODEBOOK, np.float64)[codes]
    exact = (x**3 * q).sum(-1) / (x * x * q * q).sum(-1)
    return exact.astype(np.float16) != packed[:, :2].copy().view(np.float16)[:, 0]


def main() -> None:
    blocks = np.arange(N_SEARCHED)
    x = values(blocks)
    packed = quantize(x)
    chosen = (blocks < N_FIRST) | depends_on_order(x, packed)
    fixture = {
        "llama_cpp_python": llama_cpp.__version__,
        "n_first": N_FIRST,
        "others": blocks[chosen & (blocks >= N_FIRST)].tolist(),
        "packed": base64.b64encode(packed[chosen].tobytes()).decode(),
    }
    path = Path(__file__).with_name("llama_cpp_iq4_nl.json")
    path.write_text(json.dumps(fixture) + "\n")


if __name__ == "__main__":
    main()
