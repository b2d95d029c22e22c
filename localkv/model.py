"""The forward pass: the only one, for every architecture and every backend.

Knows nothing of files, tokens' texts or sampling. Differences between architectures are data
(`ArchSpec`, optional weights); differences between machines are the backend's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localkv.arch import ArchSpec
from localkv.cache.kv_cache import Batch, KVCache
from localkv.config import AttentionParams, ModelConfig
from localkv.formats.packed_tensor import PackedTensor
from localkv.kernels.backend import Backend, TokenInputs
from localkv.kernels.layer_weights import LayerWeights, Linear, MoeWeights
from localkv.kernels.method import Use, uses
from localkv.kernels.rope import rope_frequencies, rope_table


@dataclass(frozen=True)
class ModelWeights:
    """All weights. Norms are float32; matrices stay packed; a tied `output` is `token_embd`."""

    token_embd: PackedTensor
    layers: tuple[LayerWeights, ...]
    output_norm: Tensor
    output: Linear
    rope_freqs: Tensor | None = None


class Transformer:
    """A model on a backend."""

    def __init__(
        self, config: ModelConfig, spec: ArchSpec, weights: ModelWeights, backend: Backend
    ) -> None:
        self.config = config
        self.spec = spec
        self.weights = weights
        self.backend = backend
        self.attention_params = AttentionParams(config.softmax_scale)
        self.freqs = rope_frequencies(config.rope, weights.rope_freqs).to(backend.device)

    def first_layers(self, n: int) -> Transformer:
        """The model with its first `n` layers only; its caches may have more."""
        weights = replace(self.weights, layers=self.weights.layers[:n])
        return Transformer(replace(self.config, n_layers=n), self.spec, weights, self.backend)

    def one_of_each_layer(self) -> Transformer:
        """The first layers, until each kind was among them and one more is the last.

        Kinds are told apart by the types and shapes of weights, by what is missing, and by RoPE.
        """
        layers = enumerate(self.weights.layers)
        kinds = [(_kind(layer), self._has_rope(index)) for index, layer in layers]
        n = 1 + max(map(kinds.index, kinds))
        return self.first_layers(min(n + 1, len(kinds)))

    def uses(self, type_k: str, type_v: str) -> list[Use]:
        """What the backend does for this model and a cache of two types, and how."""
        weights = self.weights
        return uses(self.backend.methods, weights.layers, weights.output, type_k, type_v)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Run a batch: its K and V are stored in `cache`, whose sequences keep their lengths.

        Returns:
            float32 [rows, n_vocab], the logits of the tokens `batch.logit_rows`.
        """
        config, backend, weights = self.config, self.backend, self.weights
        rotated, unrotated = self._token_inputs(batch)
        x = backend.embed(batch.token_ids, weights.token_embd)
        for index, layer in enumerate(weights.layers):
            layer_cache = cache.layers[index]
            inputs = rotated if self._has_rope(index) else unrotated
            q = backend.norm_qkv_rope_store(
                x, layer.attention, config, inputs, layer_cache, batch.segments
            )
            attn = backend.attention(q, layer_cache, batch, self.attention_params)
            if index == config.n_layers - 1:  # only the wanted rows go on
                x, attn = x[batch.logit_rows], attn[batch.logit_rows]
            x = backend.out_residual(x, attn, layer.attention.attn_output)
            if isinstance(layer.ffn, MoeWeights):
                assert config.moe is not None
                x = backend.moe_residual(x, layer.ffn_norm, layer.ffn, config.moe, config.rms_eps)
            else:
                x = backend.mlp_residual(x, layer.ffn_norm, layer.ffn, config.rms_eps)
        return backend.logits(x, weights.output_norm, weights.output, config.rms_eps)

    def _has_rope(self, layer: int) -> bool:
        interval = self.config.rope.no_rope_interval
        return interval == 0 or (layer + 1) % interval != 0

    def _token_inputs(self, batch: Batch) -> tuple[TokenInputs, TokenInputs]:
        """For layers with RoPE and for those without."""
        config, dtype = self.config, self.backend.dtype
        table = rope_table(
            self.freqs,
            batch.positions,
            config.rope.magnitude,
            self.spec.rope_interleaved,
            dtype,
        )
        q_scale = None
        if config.attention_temperature_scale:
            steps = batch.positions // config.attention_temperature_length
            growth = torch.log(steps.double() + 1.0)
            q_scale = (growth * config.attention_temperature_scale + 1.0).to(dtype)
        return TokenInputs(table, q_scale), TokenInputs(None, q_scale)


def _kind(weights: Any) -> Any:
    """Types and shapes of a layer's weights, or of a part of it."""
    if isinstance(weights, PackedTensor):
        return weights.format.name, weights.shape
    if isinstance(weights, Tensor):
        return weights.shape
    if is_dataclass(weights):
        return type(weights), *(_kind(getattr(weights, field.name)) for field in fields(weights))
    return weights
