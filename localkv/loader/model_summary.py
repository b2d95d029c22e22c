"""The few facts that distinguish models for a person, from a file's header alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from localkv.loader.metadata import Metadata

# Names of `general.file_type`, without MOSTLY_: ggml's `llama_ftype`.
FILE_TYPES: Final = {
    number: name
    for numbers, names in (
        ((0, 1, 2, 3), "F32 F16 Q4_0 Q4_1"),
        (range(7, 13), "Q8_0 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M"),
        (range(13, 19), "Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K"),
        (range(19, 25), "IQ2_XXS IQ2_XS Q2_K_S IQ3_XS IQ3_XXS IQ1_S"),
        (range(25, 33), "IQ4_NL IQ3_S IQ3_M IQ2_S IQ2_M IQ4_XS IQ1_M BF16"),
        (range(36, 42), "TQ1_0 TQ2_0 MXFP4_MOE NVFP4 Q1_0 Q2_0"),
    )
    for number, name in zip(numbers, names.split(), strict=True)
}
_GUESSED = 1024  # a flag on a number that a program had to guess


@dataclass(frozen=True)
class ModelSummary:
    """A header's facts about a model; None for missing ones.

    Attributes:
        architecture: "llama".
        quant: the type of most weights, "Q4_K_M".
        n_ctx_train: tokens of context it was trained with.
    """

    architecture: str | None
    quant: str | None
    n_ctx_train: int | None


def model_summary(path: str | os.PathLike[str]) -> ModelSummary:
    """Read the keys of a file; of a split model, its first part.

    Raises:
        ModelFileError: the file is missing or malformed.
    """
    from localkv.loader.gguf_file import read_metadata  # no model, no NumPy

    metadata = read_metadata(path)
    architecture = metadata.string("general.architecture", default=None)
    return ModelSummary(
        architecture,
        file_type_name(metadata),
        metadata.integer(f"{architecture}.context_length", default=None),
    )


def file_type_name(metadata: Metadata) -> str | None:
    """The type of most weights, "Q4_K_M"; None where the keys do not say."""
    file_type = metadata.integer("general.file_type", default=None)
    return None if file_type is None else FILE_TYPES.get(file_type & ~_GUESSED)
