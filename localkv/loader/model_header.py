"""The facts about a model before its tensors are read, wherever its file is.

The architecture's family makes a `ModelSpec` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from localkv.arch import ARCHS
from localkv.arch.facts import Facts
from localkv.arch.spec import AttentionSpec, LayerSpec, ModelSpec
from localkv.config import Overrides
from localkv.errors import ModelFileError, UsageError, counted, printable
from localkv.loader.gguf_header import TensorInfo
from localkv.loader.metadata import Metadata
from localkv.option_checks import unknown_name


class ModelHeader(Protocol):
    """A `GGUFFile`, or the header alone of a file that is elsewhere."""

    @property
    def path(self) -> Path:
        """The file, or its name."""
        ...

    @property
    def metadata(self) -> Metadata:
        """Keys and values of the first part."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors of all parts, by name."""
        ...


_Header = TypeVar("_Header", bound=ModelHeader)


def with_overrides(header: _Header, overrides: Overrides) -> _Header:
    """The header as if its metadata were what options put there; itself if that is nothing.

    Raises:
        UsageError: a value is of the wrong type or out of its range, or nothing reads a key.
        ModelFileError: the model can't be read otherwise.
    """
    if not overrides:
        return header
    metadata = header.metadata.with_overrides(overrides)
    changed: _Header = replace(header, metadata=metadata)  # type: ignore[type-var]
    if metadata.unread:
        _read_all(changed)
    if metadata.unread:
        unread = sorted(metadata.unread)
        names = [key for key in metadata if key not in metadata.overridden]
        what = "--override-kv: nothing of this model reads the key"
        raise unknown_name(what, unread[0], names, "leave it out")
    return changed


def _read_all(header: ModelHeader) -> None:
    """Look at all that a model is made of: layers, tokens, templates, pooling."""
    from localkv.loader.chat_template import chat_template_from_metadata
    from localkv.loader.vocabulary import NoTokenizerError, read_vocabulary

    metadata = header.metadata
    if header.tensors:
        spec = model_spec(header)
        metadata.integer(f"{spec.architecture}.pooling_type", None)
    with suppress(NoTokenizerError):
        read_vocabulary(metadata)
    chat_template_from_metadata(metadata)


_GUESSER = (
    "a block that guesses from another model's hidden states",
    "--spec mtp guesses with a block of the model's own file, --spec ngram with any model",
)
NO_TEXT_MODELS = {
    "clip": ("an encoder of images or sound (mmproj)", "only text models are supported"),
    **dict.fromkeys(("gemma4-assistant", "eagle3", "dflash"), _GUESSER),
}
"""Architectures of files that lie beside text models, what they are, and a hint."""


def model_spec(gguf: ModelHeader) -> ModelSpec:
    """Layers, sizes and constants of the model in a file.

    Raises:
        ModelFileError: the architecture is not supported, a key is missing, of the wrong type, or
            its value makes no sense.
    """
    if not gguf.tensors:
        raise ModelFileError(f"{gguf.path.name} holds no weights, only a vocabulary")
    if gguf.metadata.string("general.type", "") == "adapter":
        raise ModelFileError(
            f"{gguf.path.name} is an adapter, which changes a model and is none itself",
            hint=f"-m MODEL --lora {gguf.path.name} applies it",
        )
    name = gguf.metadata.string("general.architecture")
    if name in NO_TEXT_MODELS:
        what, hint = NO_TEXT_MODELS[name]
        raise ModelFileError(f"{gguf.path.name} is {what}, which is not supported", hint=hint)
    if name not in ARCHS:
        raise ModelFileError(
            f"architecture {name!r} is not supported", hint=f"supported: {', '.join(sorted(ARCHS))}"
        )
    _check_blocks(gguf, name)
    shapes = {tensor: info.shape for tensor, info in gguf.tensors.items()}
    title = gguf.metadata.string("general.name", default=gguf.path.stem)
    spec = ARCHS[name](Facts(name, title, gguf.metadata, shapes))
    if gguf.metadata.before_rope is None:
        return spec
    return _with_rope(spec, ARCHS[name](Facts(name, title, gguf.metadata.before_rope, shapes)))


_LONGEST = (1 << 31) - 1


def _with_rope(spec: ModelSpec, of_file: ModelSpec) -> ModelSpec:
    """A model whose RoPE options replace: layers with a window keep the file's, as in llama.cpp.

    Scaling that differs from the file's makes the trained context longer.

    Raises:
        UsageError: no layer that sees everything has RoPE.
    """
    layers = [
        theirs if _has_window(layer) else layer
        for layer, theirs in zip(spec.layers, of_file.layers, strict=True)
    ]
    ropes = [getattr(layer.mixer, "rope", None) for layer in layers if not _has_window(layer)]
    rope = next((rope for rope in ropes if rope is not None), None)
    if rope is None:
        raise UsageError(
            f"{printable(spec.name)} has no RoPE that options could change",
            hint="leave out --rope-scale and others",
        )
    trained = of_file.n_ctx_train
    before = next(
        theirs.mixer.rope.factor  # type: ignore[union-attr]
        for theirs in of_file.layers
        if not _has_window(theirs) and getattr(theirs.mixer, "rope", None) is not None
    )
    if rope.factor != before:
        is_yarn = rope.scaling == "yarn"
        longer = (
            rope.original_context_length * rope.factor
            if is_yarn
            else trained * rope.factor / before
        )
        trained = min(max(1, round(longer)), _LONGEST)
    prediction = spec.prediction
    if prediction is not None and _has_window(prediction.layer):
        prediction = of_file.prediction
    return replace(spec, layers=tuple(layers), prediction=prediction, n_ctx_train=trained)


def _has_window(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, AttentionSpec) and layer.mixer.params.window > 0


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


MOST_MORE = 128
"""Tokens that one vocabulary may have in addition, at the end: files pad their vocabularies."""


def shared_tokens(model: ModelHeader, draft: ModelHeader) -> int:
    """How many tokens a model and its draft have in common, under the same ids.

    Raises:
        UsageError: they are not the same.
    """
    kinds = [header.metadata.string("tokenizer.ggml.model", "") for header in (model, draft)]
    tokens = [header.metadata.strings("tokenizer.ggml.tokens", []) for header in (model, draft)]
    n = min(map(len, tokens))
    pairs = zip(*tokens, strict=False)
    differ = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    found = None
    if kinds[0] != kinds[1]:
        found = f"its tokenizer is {kinds[1] or 'none'}, not {kinds[0] or 'none'}"
    elif differ is not None:
        found = f"token {differ} is {tokens[1][differ]!r} there, and {tokens[0][differ]!r} here"
    elif abs(len(tokens[0]) - len(tokens[1])) > MOST_MORE or not n:
        found = f"it has {len(tokens[1])} tokens, the model {len(tokens[0])}"
    if found is not None:
        raise UsageError(
            f"{printable(draft.path.name)} can't draft for {printable(model.path.name)}: {found}",
            hint="a draft has the tokenizer of its model; smaller models of the same family do",
        )
    return n
