"""Recurrent mixers on the CPU, each one chain from the norm to what the output matrix reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import DeltaNetSpec, LayerSpec, Mamba2Spec, Mixer, ShortConvSpec
from localkv.cache.arrays import Batch, LayerCache, StateRows
from localkv.kernels.backend import Mix, TokenInputs
from localkv.kernels.bounds import BoundsError
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.layers.chains import LayerChains, norm_cpu, runs
from localkv.kernels.cpu.linear.products import CpuProducts, add_products, with_bias
from localkv.kernels.cpu.recurrent.steps import RecurrentSteps, has_recurrent_kernel
from localkv.kernels.cpu.runtime.chain import Chain, Where
from localkv.kernels.layer_weights import (
    DeltaNetWeights,
    LayerWeights,
    Linear,
    Mamba2Weights,
    ShortConvWeights,
)
from localkv.kernels.recurrent import delta_products


class RecurrentLayer:
    """A recurrent mixer, one of `Backend.mixers`.

    Args:
        composed: the mixers put together from primitives, for sizes that have no kernel.
        products: for matrices that no chain can run.
    """

    def __init__(
        self, chains: LayerChains, composed: Mapping[type[Mixer], Mix], products: CpuProducts
    ) -> None:
        self.chains = chains
        self.composed = composed
        self.products = products

    def __call__(
        self,
        x: Floats,
        layer: LayerWeights,
        spec: LayerSpec,
        inputs: TokenInputs,
        cache: LayerCache,
        batch: Batch,
    ) -> Floats:
        mixer, state, weights = spec.mixer, cache.state, layer.mixer
        assert isinstance(mixer, (DeltaNetSpec, ShortConvSpec, Mamba2Spec))
        assert state is not None
        if not has_recurrent_kernel(mixer):
            composed = self.composed[type(mixer)]
            return np.asarray(composed(x, layer, spec, inputs, cache, batch))
        n_tokens, n_sequences = len(x), len(batch.slots)
        values = _batch_values(batch, state, n_tokens)
        fused, rows = is_fused(layer, spec), dict[str, Floats]()
        if fused:
            values["x"] = np.ascontiguousarray(x)
        else:
            h = x if layer.attn_norm is None else norm_cpu(x, layer.attn_norm)
            rows = self._products(h, weights)
            values |= rows

        def make(chain: Chain) -> None:
            if fused:
                self.add(chain, n_tokens, n_sequences, layer, spec, state)
            else:
                steps = RecurrentSteps(self.chains, chain, n_tokens, n_sequences, state)
                _add_mixer(steps, {name: name for name in rows}, mixer, weights)

        made_for = (layer, spec, state.data)
        chain = self.chains.get("recurrent", made_for, n_tokens, make, n_sequences)
        out = np.empty((n_tokens, mixer.width), np.float32)
        chain.run(out=out, **values)
        return out

    def _products(self, h: Floats, weights: Any) -> dict[str, Floats]:
        """What a mixer makes of normed rows, by the names of `RecurrentSteps`."""
        if isinstance(weights, DeltaNetWeights):
            return delta_products(self.products.linear, h, weights)
        linears = _projections(weights).items()
        return {name: self.products.linear(h, linear) for name, linear in linears}

    def add(
        self,
        chain: Chain,
        n_tokens: int,
        n_sequences: int,
        layer: LayerWeights,
        spec: LayerSpec,
        state: StateRows,
    ) -> None:
        """Add the steps from the chain's "x" to its "out", with the names of `RecurrentSteps`."""
        linears, of_latents = _projections(layer.mixer), _of_latents(layer.mixer)
        h = self.chains.add_norm(chain, n_tokens, layer.attn_norm)
        last = {name: linear for name, (linear, _) in of_latents.items()}
        places: dict[str, Where] = {
            name: chain.take(4 * n_tokens * linear.weight.shape[0])
            for name, linear in (linears | last).items()
        }
        wanted = [with_bias(linear, places[name]) for name, linear in linears.items()]
        add_products(chain, h, n_tokens, wanted)
        for name, (linear, latent) in of_latents.items():
            add_products(chain, places[latent], n_tokens, [with_bias(linear, places[name])])
        steps = RecurrentSteps(self.chains, chain, n_tokens, n_sequences, state)
        _add_mixer(steps, places, spec.mixer, layer.mixer)


def is_fused(layer: LayerWeights, spec: LayerSpec) -> bool:
    """Whether a chain can run a recurrent mixer from the norm on."""
    assert isinstance(spec.mixer, (DeltaNetSpec, ShortConvSpec, Mamba2Spec))
    weights = layer.mixer
    if isinstance(weights, DeltaNetWeights) and weights.attn_k is not None:
        return False
    of_latents = (linear for linear, _ in _of_latents(weights).values())
    return has_recurrent_kernel(spec.mixer) and runs(*_projections(weights).values(), *of_latents)


def _add_mixer(add: RecurrentSteps, places: dict[str, Where], mixer: Any, weights: Any) -> None:
    match mixer, weights:
        case DeltaNetSpec(), DeltaNetWeights():
            add.delta_net(places, mixer, weights)
        case ShortConvSpec(), ShortConvWeights():
            add.short_conv(places, mixer, weights)
        case Mamba2Spec(), Mamba2Weights():
            add.mamba2(places, mixer, weights)


def _projections(weights: Any) -> dict[str, Linear]:
    """The products of a layer's normed rows."""
    match weights:
        case DeltaNetWeights(ssm_f_a=Linear() as alpha, ssm_g_a=Linear() as z):
            return {
                "mixed": weights.attn_qkv,
                "beta": weights.ssm_beta,
                "latent of z": z,
                "latent of alpha": alpha,
            }
        case DeltaNetWeights():
            return {
                "mixed": weights.attn_qkv,
                "z": weights.attn_gate,
                "beta": weights.ssm_beta,
                "alpha": weights.ssm_alpha,
            }
        case ShortConvWeights():
            return {"mixed": weights.in_proj}
        case Mamba2Weights():
            return {"mixed": weights.ssm_in}
    raise BoundsError(f"{type(weights).__name__} are no weights of a recurrent layer")


def _of_latents(weights: Any) -> dict[str, tuple[Linear, str]]:
    """The products of what the first ones gave, and which of these they read."""
    match weights:
        case DeltaNetWeights(ssm_f_a=Linear()):
            return {
                "z": (weights.attn_gate, "latent of z"),
                "alpha": (weights.ssm_alpha, "latent of alpha"),
            }
    return {}


def _batch_values(batch: Batch, state: StateRows, n_tokens: int) -> dict[str, int | NDArray[Any]]:
    """What all chains are given of a batch.

    Raises:
        BoundsError: a sequence has no place among the states, or the tokens are others.
    """
    starts = batch.starts
    if starts[-1] != n_tokens or any(a > b for a, b in pairwise(starts)):
        raise BoundsError(f"{n_tokens} tokens of sequences at {starts}")
    if not 0 <= int(batch.slots.min()) <= int(batch.slots.max()) < len(state.data):
        raise BoundsError(f"{len(state.data)} states of sequences, and slots {batch.slots}")
    check_after(batch, len(state.data))
    return {
        "starts": batch.start_table,
        "slots": batch.slots,
        "after": batch.after,
        "states": state.data,
    }


def check_after(batch: Batch, n_states: int) -> None:
    """Refuse to write states to other places than there are.

    Raises:
        BoundsError: a token's is no place, or there are more tokens, or fewer.
    """
    after = batch.after
    if len(after) != batch.starts[-1] or not 0 <= int(after.min()) <= int(after.max()) < n_states:
        raise BoundsError(f"{n_states} states of sequences, and those after tokens go to {after}")
