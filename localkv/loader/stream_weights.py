"""The tensors of per-layer embeddings, Laurel and AltUp."""

from __future__ import annotations

from localkv.arch.spec import PER_LAYER_ROWS, AltUpSpec, LaurelSpec, ModelSpec, PerLayerInputSpec
from localkv.kernels.layer_weights import AltUpWeights, LaurelWeights, PerLayerInputWeights
from localkv.kernels.stream_weights import AltUpProjections, PerLayerTable
from localkv.loader.tensor_reader import TensorReader


def per_layer_table(read: TensorReader, config: ModelSpec) -> PerLayerTable | None:
    """The model's part of per-layer embeddings, or None.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    spec = config.per_layer_input
    if spec is None:
        return None
    width = config.n_layers * spec.width
    return PerLayerTable(
        token_embd=read.packed(PER_LAYER_ROWS, config.n_vocab, width),
        model_proj=read.linear("per_layer_model_proj", width, config.n_embd),
        proj_norm=read.norm(spec.norm, spec.width),
    )


def altup_projections(read: TensorReader, config: ModelSpec) -> AltUpProjections | None:
    """The model's part of AltUp, or None.

    Raises:
        ModelFileError: a tensor is missing, or of the wrong shape or type.
    """
    if config.altup is None:
        return None
    n, n_embd = config.altup.n_streams - 1, config.n_embd
    return AltUpProjections(
        proj=read.linears("altup_proj", n, n_embd, n_embd),
        unembd_proj=read.linears("altup_unembd_proj", n, n_embd, n_embd),
    )


def per_layer_input_weights(
    read: TensorReader, spec: PerLayerInputSpec, n_embd: int, at: str
) -> PerLayerInputWeights:
    """Those of the layer whose tensors' names begin with `at`; raises as `per_layer_table`."""
    return PerLayerInputWeights(
        inp_gate=read.linear(f"{at}inp_gate", spec.width, n_embd),
        proj=read.linear(f"{at}proj", n_embd, spec.width),
        post_norm=read.norm(spec.post_norm, n_embd, at),
    )


def laurel_weights(read: TensorReader, spec: LaurelSpec, n_embd: int, at: str) -> LaurelWeights:
    """Those of the layer whose tensors' names begin with `at`; raises as `per_layer_table`."""
    return LaurelWeights(
        laurel_l=read.linear(f"{at}laurel_l", spec.rank, n_embd),
        laurel_r=read.linear(f"{at}laurel_r", n_embd, spec.rank),
        post_norm=read.norm(spec.norm, n_embd, at),
    )


def altup_weights(read: TensorReader, spec: AltUpSpec, n_embd: int, at: str) -> AltUpWeights:
    """Those of the layer whose tensors' names begin with `at`; raises as `per_layer_table`."""
    n = spec.n_streams
    return AltUpWeights(
        router=read.linear(f"{at}altup_router", n, n_embd),
        router_norm=read.norm(spec.router_norm, n_embd, at),
        predict_coef=read.vector(f"{at}altup_predict_coef.weight", n * n, n),
        correct_coef=read.vector(f"{at}altup_correct_coef.weight", n, n),
        correct_scale=read.vector(f"{at}altup_correct_scale.weight", n_embd),
    )
