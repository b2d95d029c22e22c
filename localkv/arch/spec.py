"""A model as data: a list of layers, each with its mixer, its feed-forward block and its norms.

The files of the families (`arch/llama.py`, ...) make these of a file's metadata. Everything above
reads them and knows no architecture's name: the forward pass, the loader, the backends, the cache
and the memory plan. Nothing here computes, and nothing imports an array library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from localkv.arch.ffn_spec import Ffn, MlpAndMoeSpec, MlpSpec, MoeSpec
from localkv.arch.mixer_spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    Mixer,
    ShortConvSpec,
)
from localkv.arch.norm_spec import NormSpec
from localkv.arch.rope_spec import RopeSpec
from localkv.arch.state_spec import LayerState
from localkv.arch.stream_spec import AltUpSpec, LaurelSpec, PerLayerInputSpec


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a mixer, then a feed-forward block, each added to the residual stream.

    Attributes:
        mixer: attention, or what has its place; None in a layer that has only the other block.
        ffn: dense or routed; None in a layer that has only a mixer.
        attn_norm, ffn_norm: before each; None reads x as it is.
        post_attn_norm, post_ffn_norm: after each, before it is added; or None.
        beside: a second mixer, which reads what the first one reads; both are added (Falcon-H1).
        parallel: the feed-forward block reads the layer's input, as the mixer does, not the sum.
        residual_scale: factor on what each block adds.
        output_scale: the tensor [1] with a factor on the layer's output, or None.
        per_layer_input: added behind the feed-forward block, or None.
        laurel: beside the mixer, or None.
    """

    mixer: Mixer | None
    ffn: Ffn | None
    attn_norm: NormSpec | None
    ffn_norm: NormSpec | None
    post_attn_norm: NormSpec | None = None
    post_ffn_norm: NormSpec | None = None
    beside: Mixer | None = None
    parallel: bool = False
    residual_scale: float = 1.0
    output_scale: str | None = None
    per_layer_input: PerLayerInputSpec | None = None
    laurel: LaurelSpec | None = None

    @property
    def attention(self) -> AttentionSpec:
        """The mixer, which has to be attention of grouped queries."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def moe(self) -> MoeSpec | None:
        """Its routed experts, if it has some."""
        match self.ffn:
            case MlpAndMoeSpec(moe=moe) | (MoeSpec() as moe):
                return moe
        return None

    @property
    def mlp(self) -> MlpSpec | None:
        """Its dense block, if it has one."""
        match self.ffn:
            case MlpAndMoeSpec(mlp=mlp) | (MlpSpec() as mlp):
                return mlp
        return None

    @property
    def n_ff(self) -> int:
        """The widest hidden row of its feed-forward block, 0 if it has none."""
        mlp, moe = self.mlp, self.moe
        return max(mlp.n_ff if mlp else 0, moe.n_ff if moe else 0, moe.n_ff_shared if moe else 0)


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches are alike.

    Attributes:
        n_kv_heads, key_dim, value_dim: of each layer.
        window: positions that its tokens see, or 0 for all.
        layers: their indices.
        chunk: its tokens see from the last multiple of it on, or 0.
        is_latent: K's rows are latents, of which V is a view, and V's place is taken by the rotated
            parts of keys (`LatentAttentionSpec`).
    """

    n_kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    layers: tuple[int, ...]
    chunk: int = 0
    is_latent: bool = False

    @property
    def reach(self) -> int:
        """Rows that a token may see, its own included; 0 for all before it."""
        return self.window or self.chunk


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and constants of one model.

    Attributes:
        architecture, name: as the file says.
        n_embd, n_vocab: width of the residual stream, and tokens of the vocabulary.
        n_ctx_train: tokens of context that it was trained for.
        layers: in order.
        output_norm: before the output matrix.
        embedding_scale: factor on the rows of the embedding.
        logit_scale: factor on the logits.
        logit_softcap: cap * tanh(logit / cap) takes their place; 0 is no cap.
        ignored_tensors: what names of tensors begin with that the file may have and text does not
            need, as those of blocks that predict further tokens.
        altup: there are several residual streams, or None.
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    layers: tuple[LayerSpec, ...]
    output_norm: NormSpec
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    ignored_tensors: tuple[str, ...] = ()
    altup: AltUpSpec | None = None

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor of the file is none that text needs."""
        return tensor.startswith(self.ignored_tensors)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers with K and V of their own by what their caches need, in the order of each
        group's first layer."""
        found = dict[CacheGroup, list[int]]()
        for i, layer in enumerate(self.layers):
            if (group := _cache_group(layer.mixer)) is not None:
                found.setdefault(group, []).append(i)
        return tuple(replace(group, layers=tuple(layers)) for group, layers in found.items())

    @cached_property
    def states(self) -> tuple[LayerState, ...]:
        """Of the recurrent layers, in order."""
        return tuple(
            LayerState(i, mixer.state)
            for i, layer in enumerate(self.layers)
            for mixer in (layer.mixer, layer.beside)
            if isinstance(mixer, (DeltaNetSpec, ShortConvSpec, Mamba2Spec))
        )

    @cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """Each layer that differs from all before it."""
        different_objects = {id(layer): layer for layer in self.layers}
        return tuple(dict.fromkeys(different_objects.values()))

    @cached_property
    def per_layer_input(self) -> PerLayerInputSpec | None:
        """That of its layers, which all have it or none."""
        return self.layers[0].per_layer_input

    @property
    def has_experts(self) -> bool:
        return any(layer.moe is not None for layer in self.kinds)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Each way in which layers rotate q and k."""
        found = (getattr(layer.mixer, "rope", None) for layer in self.kinds)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))


def _cache_group(mixer: Mixer | None) -> CacheGroup | None:
    """That of a layer, without layers; None for one that stores no rows."""
    match mixer:
        case AttentionSpec(kv_from=None):
            params = mixer.params
            return CacheGroup(
                mixer.n_kv_heads, mixer.key_dim, mixer.value_dim, params.window, (), params.chunk
            )
        case LatentAttentionSpec():
            return CacheGroup(1, mixer.latent_dim, mixer.rope_dim, 0, (), is_latent=True)
    return None
