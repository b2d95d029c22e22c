"""Named tensors -> `ModelWeights`, by the model's specification."""

from __future__ import annotations

import os
from collections.abc import Callable

from localkv.arch.spec import AltUpSpec, LayerSpec, ModelSpec, NormSpec
from localkv.kernels.backend import Backend
from localkv.kernels.layer_kinds import check_layers
from localkv.kernels.layer_weights import LayerWeights, Linear, Norm
from localkv.loader.ffn_weights import ffn_weights
from localkv.loader.gguf_file import GGUFFile, open_gguf
from localkv.loader.mixer_weights import mixer_weights
from localkv.loader.model_spec import model_spec
from localkv.loader.smoothing import SmoothedTensors, Smoothing
from localkv.loader.stream_weights import (
    altup_projections,
    altup_weights,
    laurel_weights,
    per_layer_input_weights,
    per_layer_table,
)
from localkv.loader.tensor_reader import FileTensors, TensorReader, TensorSource
from localkv.model import ModelWeights, Transformer


def load_model(
    path: str | os.PathLike[str] | GGUFFile,
    backend: Backend,
    *,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
    smoothing: Smoothing | None = None,
    late: bool = False,
) -> tuple[Transformer, list[str]]:
    """The model in a GGUF file, on a backend.

    Args:
        path: the file.
        backend: prepares the weights as it wants them.
        on_layer: called with the layers that are loaded, of how many.
        smoothing: of K and V, folded into the weights.
        late: weights may be laid out while the model is in use (`Backend.late`), where they are
            views of the file.

    Returns:
        the model, and the names of tensors that it does not know.

    Raises:
        ModelFileError: the file is malformed, its architecture, a type or on this backend a layer
            is not supported, or a tensor is missing or of the wrong shape.
    """
    gguf = path if isinstance(path, GGUFFile) else open_gguf(path)
    config = model_spec(gguf)
    check_layers(backend, config)
    source: TensorSource = FileTensors(gguf)
    if smoothing is not None:
        source = SmoothedTensors(source, smoothing.tensor_factors(config, gguf.tensors))
    read = TensorReader(
        source,
        backend,
        halve_activations=config.has_experts,
        late=backend.late if late and smoothing is None else None,
    )
    weights = model_weights(read, config, on_layer)
    unused = [name for name in gguf.tensors if name not in read.taken and not config.ignores(name)]
    return Transformer(config, weights, backend), unused


def model_weights(
    read: TensorReader,
    config: ModelSpec,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> ModelWeights:
    """All tensors that a model has.

    Args:
        on_layer: called with the layers that are read, of how many.

    Raises:
        ModelFileError: one is missing, or of the wrong shape or type.
    """
    n_vocab, n_embd = config.n_vocab, config.n_embd
    token_embd = read.embedding("token_embd.weight", n_vocab, n_embd)
    if read.has("output.weight"):
        output = read.linear("output", n_vocab, n_embd)
    elif not token_embd.reads_rows:
        output = Linear(token_embd)
    else:
        output = Linear(read.late_matrix("token_embd.weight", n_vocab, n_embd))
    divisors = {
        name: read.values(name, rope.n_dims // 2)
        for rope in config.ropes
        for name in (rope.divisors, rope.long_divisors)
        if name
    }
    layers = []
    for i, spec in enumerate(config.layers):
        on_layer(i, config.n_layers)
        layers.append(layer_weights(read, spec, config.altup, n_embd, f"blk.{i}."))
    on_layer(config.n_layers, config.n_layers)
    return ModelWeights(
        token_embd=token_embd,
        layers=tuple(layers),
        output_norm=read.norm(config.output_norm, n_embd),
        output=output,
        rope_divisors=divisors,
        per_layer=per_layer_table(read, config),
        altup=altup_projections(read, config),
    )


def layer_weights(
    read: TensorReader, spec: LayerSpec, altup: AltUpSpec | None, n_embd: int, at: str
) -> LayerWeights:
    """Those of the layer whose tensors' names begin with `at`."""
    per_layer, laurel = spec.per_layer_input, spec.laurel

    def norm(of: NormSpec | None) -> Norm | None:
        return None if of is None else read.norm(of, n_embd, at)

    scale = 1.0
    if spec.output_scale is not None:
        scale = float(read.values(f"{at}{spec.output_scale}.weight", 1)[0])
    return LayerWeights(
        mixer=None if spec.mixer is None else mixer_weights(read, spec.mixer, n_embd, at),
        ffn=None if spec.ffn is None else ffn_weights(read, spec.ffn, n_embd, at),
        attn_norm=norm(spec.attn_norm),
        ffn_norm=norm(spec.ffn_norm),
        post_attn_norm=norm(spec.post_attn_norm),
        post_ffn_norm=norm(spec.post_ffn_norm),
        output_scale=scale,
        per_layer_input=per_layer_input_weights(read, per_layer, n_embd, at) if per_layer else None,
        laurel=laurel_weights(read, laurel, n_embd, at) if laurel else None,
        altup=altup_weights(read, altup, n_embd, at) if altup else None,
        beside=None if spec.beside is None else mixer_weights(read, spec.beside, n_embd, at),
    )
