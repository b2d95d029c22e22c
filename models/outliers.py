"""Writes an outlier twin of a GGUF model: the same function, but large channels in K and V, or in
what meets matrices.

Keys of large models have a few channels in each head, always the same ones, that are about ten
times as large as the others (KIVI, arXiv 2402.02750, section 3; QServe, arXiv 2405.04532, section
5.2); values have no such pattern. Small models lack them, so types of a KV cache that differ on a
large model look alike on a small one. A twin has them and computes the same logits:

- K channels are multiplied by `k_strength`, and Q channels divided by it. RoPE mixes the two
  channels of a pair, so they share a factor. Where K and Q are normed by head, the norms' weights
  take the factors.
- V channels are multiplied by `v_strength`. The columns of the output matrix that read them are
  divided by it.
- With `--x-channels`, channels of what norms before matrices give, and of what `ffn_down` reads,
  are multiplied by `x_strength`, and columns are divided by it. Large models have such outliers
  (LLM.int8(), arXiv 2208.07339, section 4); 8-bit activations lose the channels beside them.

Strengths are powers of two, so every product in float32 is the same except for its exponent. Scaled
matrices are written as F32: a packed matrix can't be scaled by column.

    python models/outliers.py models/tales-4M-F16.gguf --out twin.gguf
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import ModelSpec, RopeSpec
from localkv.errors import LocalKVError, ModelFileError, UsageError
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.model_header import model_spec
from localkv.loader.smoothing import Factors, channel_factors, matrix_inputs
from localkv.loader.weights import check_tensors


@dataclass(frozen=True)
class Outliers:
    """The channels that are made larger, and by how much.

    Four K channels in a head of 64, eight times as large, are in the range that is reported of
    large models (a few channels, 8 to 16 times); V is reported to be mild.

    Attributes:
        k_pairs: RoPE pairs of channels, for each KV head (two channels a pair).
        k_strength: factor of those, a power of two.
        v_channels: channels of V, for each KV head.
        v_strength: factor of those, a power of two.
        x_channels: channels of each input of matrices (`matrix_inputs`).
        x_strength: factor of those, a power of two.
        seed: of the draw of channels.

    Raises:
        UsageError: a count is negative, or a strength no power of two between 1 and 4096.
    """

    k_pairs: int = 2
    k_strength: int = 8
    v_channels: int = 2
    v_strength: int = 2
    x_channels: int = 0
    x_strength: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k_pairs", "v_channels", "x_channels", "seed"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("k_strength", "v_strength", "x_strength"):
            value = getattr(self, name)
            if not 1 <= value <= 4096 or value & (value - 1):
                raise UsageError(
                    f"{name} is {value}, which is no power of two between 1 and 4096",
                    hint="other factors would change the model by rounding",
                )


def k_factors(outliers: Outliers, config: ModelSpec, layer: int) -> Factors:
    """What K of a layer is multiplied with: [n_kv_heads, head_dim], equal in both of a RoPE pair.

    With a norm per head all heads have the same channels, since they share the norm's weights.

    Raises:
        UsageError: a head has fewer pairs.
    """
    attention = config.layers[layer].attention
    n_kv_heads, head_dim = attention.n_kv_heads, attention.key_dim
    rope = attention.rope or RopeSpec(head_dim)
    n_pairs = rope.n_dims // 2
    if outliers.k_pairs > n_pairs:
        raise UsageError(
            f"{outliers.k_pairs} pairs of K channels, but RoPE has {n_pairs} in a head"
        )
    rng = np.random.default_rng((outliers.seed, layer, 0))
    factors = np.ones((n_kv_heads, head_dim), np.float32)
    n_draws = 1 if attention.k_norm else n_kv_heads
    draws = [rng.choice(n_pairs, outliers.k_pairs, replace=False) for _ in range(n_draws)]
    for head in range(n_kv_heads):
        pairs = draws[head % n_draws]
        first, second = (2 * pairs, 2 * pairs + 1)
        if not rope.interleaved:
            first, second = pairs, pairs + n_pairs
        factors[head, first] = factors[head, second] = outliers.k_strength
    return factors


def v_factors(outliers: Outliers, config: ModelSpec, layer: int) -> Factors:
    """What V of a layer is multiplied with: [n_kv_heads, head_dim].

    Raises:
        UsageError: a head has fewer channels.
    """
    attention = config.layers[layer].attention
    n_kv_heads, head_dim = attention.n_kv_heads, attention.value_dim
    if outliers.v_channels > head_dim:
        raise UsageError(f"{outliers.v_channels} V channels, but a head has {head_dim}")
    rng = np.random.default_rng((outliers.seed, layer, 1))
    factors = np.ones((n_kv_heads, head_dim), np.float32)
    for head in range(n_kv_heads):
        channels = rng.choice(head_dim, outliers.v_channels, replace=False)
        factors[head, channels] = outliers.v_strength
    return factors


def x_factors(outliers: Outliers, width: int, number: int) -> Factors:
    """What an input of matrices is multiplied with: [width].

    Args:
        number: of the input in the model's list.

    Raises:
        UsageError: it has fewer channels.
    """
    if outliers.x_channels > width:
        raise UsageError(f"{outliers.x_channels} channels, but an input of matrices has {width}")
    rng = np.random.default_rng((outliers.seed, number, 2))
    factors = np.ones(width, np.float32)
    factors[rng.choice(width, outliers.x_channels, replace=False)] = outliers.x_strength
    return factors


def tensor_factors(outliers: Outliers, gguf_file: GGUFFile) -> dict[str, Factors]:
    """What each tensor that changes is multiplied with, in a shape that broadcasts.

    Raises:
        ModelFileError: the architecture is not supported, or a layer lacks a tensor.
        UsageError: there are fewer channels.
    """
    config = model_spec(gguf_file)
    check_tensors(gguf_file, config)
    layers = range(config.n_layers)
    found = channel_factors(
        config,
        gguf_file.tensors,
        {layer: k_factors(outliers, config, layer) for layer in layers},
        {layer: v_factors(outliers, config, layer) for layer in layers},
    )
    if not outliers.x_channels:
        return found
    for number, one in enumerate(matrix_inputs(config, gguf_file.tensors)):
        width = gguf_file.tensors[one.readers[0]].shape[-1]
        own = one.tensor_factors(x_factors(outliers, width, number), gguf_file.tensors)
        for name, by in own.items():
            found[name] = found[name] * by if name in found else by
    return found


def write_twin(source: Path, target: Path, outliers: Outliers) -> None:
    """Write the twin of `source`; tensors that do not change keep their bytes.

    Raises:
        ModelFileError: the file is split, malformed, or of an architecture or type that is not
            supported.
        UsageError: both files are the same, or the model has fewer channels.
    """
    opened = open_gguf(source)
    if len(opened.parts) > 1:
        raise ModelFileError(f"{source}: a split model", hint="join its parts with gguf-split")
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} is the model itself", hint="write the twin to another file")
    factors = tensor_factors(outliers, opened)
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, opened.metadata.string("general.architecture"))
    _copy_metadata(reader, writer)
    writer.data_alignment = opened.alignment
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        if tensor.name in factors:
            n_bytes = 4 * tensor.n_elements
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), n_bytes)
        else:
            kind = tensor.tensor_type
            shape = tensor.data.shape
            writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, tensor.n_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in _tensors(reader, factors):  # one at a time: the model may be larger than memory
        writer.write_tensor_data(data)
    writer.close()


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "general.name":
            value += ", outlier twin"
        writer.add_key_value(key, value, field.types[0], field.types[-1])


def _tensors(reader: gguf.GGUFReader, factors: dict[str, Factors]) -> Iterator[NDArray[np.generic]]:
    for tensor in reader.tensors:
        if tensor.name in factors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            yield (values * factors[tensor.name]).astype(np.float32)
        else:
            yield tensor.data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Outliers()
    parser.add_argument("source", type=Path, metavar="MODEL", help="a GGUF file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    for name, what in (
        ("k_pairs", "RoPE pairs of K channels to scale, for each KV head"),
        ("k_strength", "their factor, a power of two"),
        ("v_channels", "V channels to scale, for each KV head"),
        ("v_strength", "their factor, a power of two"),
        ("x_channels", "channels of each input of matrices to scale"),
        ("x_strength", "their factor, a power of two"),
        ("seed", "draws the channels"),
    ):
        default = getattr(defaults, name)
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{what} (default {default})"
        )
    options = vars(parser.parse_args())
    source, target = options.pop("source"), options.pop("out")
    try:
        write_twin(source, target, Outliers(**options))
    except LocalKVError as error:
        sys.exit(f"error: {error}")
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
