"""The format of each tensor in a file of one type of weights, as llama-quantize makes it.

Matrices in that type (`--pure` except for the output matrix, which has at least Q6_K's bits),
vectors, routers and other small tensors as they are. Files whose names end in _M keep some more
matrices in more bits and are up to a tenth larger.
"""

from __future__ import annotations

from localkv.quant_formats import FORMATS, QuantFormat

FLOAT_PARTS = ("_norm.weight", "ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "altup_", "laurel_")
"""In names of tensors that llama-quantize leaves as they are."""


def tensor_format(
    name: str, shape: tuple[int, ...], type_name: str, *, is_output: bool
) -> QuantFormat:
    """The format of a tensor in a file whose type of weights is `type_name`."""
    if not is_quantised(name, shape):
        return FORMATS["f32"]
    return quantised_format(shape[-1], type_name, is_output=is_output)


def bits(fmt: QuantFormat) -> float:
    """Bits per value, without a scale per row."""
    return 8 * fmt.block_bytes / fmt.block_size


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama-quantize changes a tensor's type."""
    return (
        len(shape) > 1
        and name.endswith(".weight")
        and not any(part in name for part in FLOAT_PARTS)
    )


def quantised_format(n_in: int, type_name: str, *, is_output: bool) -> QuantFormat:
    """The format of a matrix with rows of `n_in` values in a file of the type `type_name`."""
    if is_output and bits(FORMATS[type_name]) < bits(FORMATS["q6_K"]):
        type_name = "q6_K"
    fmt = FORMATS[type_name]
    if n_in % fmt.block_size:
        fmt = FORMATS[fmt.narrow or "f16"]
    return FORMATS["f16"] if n_in % fmt.block_size else fmt
