"""A hash by which measurements of a model are found again, and kept from other models.

It is of the tensors' names, types and shapes and of a sample of the bytes of each: a file of many
gigabytes takes as long as a small one, and other weights of the same shape (a fine-tuned model,
another quantisation) have another hash. Metadata are not part of it, so a corrected chat template
or another name leaves measurements valid; nor are places in files, so a split model has that of the
whole one.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from localkv.loader.gguf_file import GGUFFile

SAMPLE_BYTES = 512
"""At the beginning, in the middle and at the end of each tensor."""


def model_hash(gguf: GGUFFile) -> str:
    """32 hexadecimal digits.

    Raises:
        ModelFileError: a tensor can't be read.
    """
    gguf = replace(gguf, copies=None)  # a sample does without the whole tensor
    found = hashlib.sha256()
    for name in sorted(gguf.tensors):
        tensor = gguf.tensors[name]
        found.update(f"{name}\0{tensor.format.name}\0{tensor.shape}\0".encode(errors="replace"))
        data = gguf.data(name).reshape(-1)
        for at in (0, len(data) // 2, max(0, len(data) - SAMPLE_BYTES)):
            found.update(data[at : at + SAMPLE_BYTES].tobytes())
    return found.hexdigest()[:32]
