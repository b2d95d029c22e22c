"""The layers that a backend can run: what it hasn't is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    EncoderAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpAndMoeSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
)
from localkv.errors import ModelFileError, UsageError
from localkv.kernels.backend import Backend
from localkv.kernels.places import Places

WORDS: dict[type, str] = {
    AttentionSpec: "attention",
    EncoderAttentionSpec: "attention to both sides",
    LatentAttentionSpec: "latent attention",
    DeltaNetSpec: "gated delta nets",
    ShortConvSpec: "short convolutions",
    Mamba2Spec: "Mamba-2",
    MlpSpec: "a dense feed-forward block",
    MoeSpec: "routed experts",
    MlpAndMoeSpec: "experts beside a dense block",
}
"""Kinds of mixers and of feed-forward blocks, as users know them."""


def why_not(backend: Backend, layer: LayerSpec) -> str:
    """What the backend can't do of a layer, in words; empty if it can do all."""
    for part, known in ((layer.mixer, backend.mixers), (layer.ffn, backend.ffns)):
        if part is not None and type(part) not in known:
            return WORDS[type(part)]
    return backend.lacks(layer)


def check_layers(backend: Backend, config: ModelSpec) -> None:
    """Refuse a model with a layer that the backend can't run.

    Raises:
        ModelFileError: names the layer and what is missing.
        UsageError: its heads have a size that the backend can't take.
    """
    for kind in config.kinds:
        if reason := why_not(backend, kind):
            raise ModelFileError(
                f"device {backend.name} can't run {reason} (layer {config.layers.index(kind)} "
                f"of a {config.architecture} model)",
                hint="use --device cpu" if backend.processor == "GPU" else None,
            )
    multiple = backend.head_dim_multiple
    for group in config.groups:
        if group.key_dim % multiple:
            raise UsageError(
                f"head_dim {group.key_dim} is not a multiple of {multiple}, as the "
                f"{backend.name} backend needs",
                hint="use device reference, which is slow",
            )


def check_places(places: Places, config: ModelSpec) -> None:
    """Refuse a model with a part of a layer that its place can't run; raises as `check_layers`."""
    placement = places.placement
    for k in placement.used:
        own = tuple(
            replace(
                layer,
                mixer=layer.mixer if placement.layers[i] == k else None,
                beside=layer.beside if placement.layers[i] == k else None,
                ffn=layer.ffn if placement.blocks[i] == k else None,
            )
            for i, layer in enumerate(config.layers)
        )
        check_layers(places.backends[k], replace(config, layers=own))
