"""What makes two files the same model: for measurements of it, and for K and V of its layers.

`model_hash` finds measurements of a model again, and keeps them from other models. It covers the
tensors' names, types and shapes and a sample of the bytes of each. So a file of many gigabytes
takes as long as a small one. Other weights of the same shape (a fine-tuned model, another
quantisation) have another hash. Metadata are not part of it, so a corrected chat template or
another name leaves measurements valid. Places in files aren't either, so a split model has the hash
of the whole one.

`measured_hash` also covers what options replace of that, as measurements do, and
`model_fingerprint` also covers what the file says of the architecture, on which K and V depend.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace

from localkv.arch.spec import ModelSpec
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.smoothing import Exponents, Smoothing

SAMPLE_BYTES = 512
"""Bytes at the beginning, in the middle and at the end of each tensor."""


def model_hash(gguf: GGUFFile) -> str:
    """32 hexadecimal digits over the tensors.

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


ARCHITECTURE = "general.architecture"


def measured_hash(gguf: GGUFFile) -> str:
    """What tells measurements of K and V of one model from others': `model_hash`, or another one
    where options replace what the file says of the architecture.

    Raises:
        ModelFileError: a tensor can't be read.
    """
    found, metadata = model_hash(gguf), gguf.metadata
    prefix = f"{metadata.string(ARCHITECTURE)}."
    changes = metadata.changes.items()
    kept = sorted((k, v) for k, v in changes if k.startswith(prefix) or k == ARCHITECTURE)
    return hashlib.sha256(f"{found}\0{kept!r}".encode()).hexdigest()[:32] if kept else found


def model_fingerprint(gguf: GGUFFile) -> str:
    """32 hexadecimal digits over `model_hash` and what the file, or `--override-kv`, says of the
    architecture: sizes, RoPE, norms, windows. Options of RoPE, names, templates and the tokenizer
    are not part of it, nor are bytes of large tensors between the samples.

    Raises:
        ModelFileError: a tensor can't be read.
    """
    metadata = gguf.metadata.before_rope or gguf.metadata
    prefix = f"{metadata.string(ARCHITECTURE)}."
    found = hashlib.sha256(model_hash(gguf).encode())
    for key in sorted(metadata):
        if key.startswith(prefix) or key == ARCHITECTURE:
            found.update(f"{key}\0{metadata[key]!r}\0".encode(errors="replace"))
    return found.hexdigest()[:32]


def model_identity(
    gguf: GGUFFile, config: ModelSpec, n_ctx: int, smoothing: Smoothing | None
) -> dict[str, str]:
    """What K and V of a text depend on, the cache aside, for people and for comparison.

    Args:
        n_ctx: tokens of context, by which some models choose their RoPE.
        smoothing: that the weights were loaded with.

    Raises:
        ModelFileError: a tensor can't be read.
    """
    ropes = [{**asdict(rope), "divisors_used": rope.divisors_in(n_ctx)} for rope in config.ropes]
    factors = ""
    if smoothing is not None and (smoothing.k or smoothing.v):
        factors = json.dumps([_listed(smoothing.k), _listed(smoothing.v)])
    return {
        "architecture": config.architecture,
        "model_name": config.name,
        "model": model_fingerprint(gguf),
        "rope": json.dumps(ropes),
        "smoothing": hashlib.sha256(factors.encode()).hexdigest()[:32] if factors else "",
    }


def _listed(exponents: Mapping[int, Exponents]) -> list[tuple[int, Exponents]]:
    return sorted(exponents.items())
