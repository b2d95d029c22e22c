"""Whether two files are the same model as far as K and V of its layers are concerned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

from localkv.arch.spec import ModelSpec
from localkv.loader.gguf_file import GGUFFile
from localkv.loader.model_hash import model_hash
from localkv.loader.smoothing import Exponents, Smoothing

ARCHITECTURE = "general.architecture"


def model_fingerprint(gguf: GGUFFile) -> str:
    """32 hexadecimal digits, of `model_hash` and of what the file says of the architecture: sizes,
    RoPE, norms, windows. Names, templates and the tokenizer are not part of it, nor are bytes of
    large tensors between the samples.

    Raises:
        ModelFileError: a tensor can't be read.
    """
    metadata = gguf.metadata
    prefix = f"{metadata.string(ARCHITECTURE)}."
    found = hashlib.sha256(model_hash(gguf).encode())
    for key in sorted(metadata):
        if key.startswith(prefix) or key == ARCHITECTURE:
            found.update(f"{key}\0{metadata[key]!r}\0".encode(errors="replace"))
    return found.hexdigest()[:32]


def model_identity(
    gguf: GGUFFile, config: ModelSpec, n_ctx: int, smoothing: Smoothing | None
) -> dict[str, str]:
    """What K and V of a text depend on besides the cache, for people and for comparison.

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
