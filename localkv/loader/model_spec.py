"""`ModelSpec` from a GGUF file's header: its architecture's family reads it."""

from __future__ import annotations

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.arch.spec import ModelSpec
from localkv.errors import ModelFileError, counted
from localkv.loader.model_header import ModelHeader

NO_TEXT_MODELS = {"clip": "an encoder of images or sound (mmproj)"}
"""Architectures of files that lie beside text models, and what they are."""


def model_spec(gguf: ModelHeader) -> ModelSpec:
    """Layers, sizes and constants of the model in a file.

    Raises:
        ModelFileError: the architecture is not supported, a key is missing, of the wrong type, or
            its value makes no sense.
    """
    if not gguf.tensors:
        raise ModelFileError(f"{gguf.path.name} holds no weights, only a vocabulary")
    name = gguf.metadata.string("general.architecture")
    if name in NO_TEXT_MODELS:
        raise ModelFileError(
            f"{gguf.path.name} is {NO_TEXT_MODELS[name]}, which is not supported",
            hint="only text models are supported",
        )
    if name not in ARCHS:
        raise ModelFileError(
            f"architecture {name!r} is not supported", hint=f"supported: {', '.join(sorted(ARCHS))}"
        )
    _check_blocks(gguf, name)
    shapes = {tensor: info.shape for tensor, info in gguf.tensors.items()}
    title = gguf.metadata.string("general.name", default=gguf.path.stem)
    return ARCHS[name](Facts(name, title, gguf.metadata, shapes))


def _check_blocks(gguf: ModelHeader, architecture: str) -> None:
    """Refuse a number of layers that the file's tensors don't have, before a loop counts to it.

    The blocks that predict further tokens may be missing.
    """
    facts = Facts(architecture, "", gguf.metadata, {})
    names = (tensor.split(".", 2) for tensor in gguf.tensors if tensor.startswith("blk."))
    there = len({parts[1] for parts in names})
    if facts.n_layers > there:
        raise ModelFileError(
            f"key {facts.key('block_count')!r} is {facts.integer('block_count')}, but "
            f"{gguf.path.name} has tensors of {counted(there, 'block')}"
        )
