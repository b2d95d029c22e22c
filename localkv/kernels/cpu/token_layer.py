"""The steps of one layer for a few generated tokens, in the places of their program."""

from __future__ import annotations

from collections.abc import Callable

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ShortConvSpec,
)
from localkv.kernels.backend import StackLayer, TokenBatch
from localkv.kernels.cpu import latent_layer, recurrent_layer
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.attention.kernels import worker_of
from localkv.kernels.cpu.attention.token_steps import AttentionSteps
from localkv.kernels.cpu.attention_layer import (
    add_gate,
    add_merge,
    add_sinks,
    is_stored_at_once,
)
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layer import CpuLayer, down_of
from localkv.kernels.cpu.layer_chains import RESIDUALS, ROW_STEPS, adds_at_once
from localkv.kernels.cpu.linear.activation_job import MOST_PARTS, ActivationJob, ResidualJob
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Where
from localkv.kernels.cpu.store.job import RotateJob
from localkv.kernels.cpu.token_places import TokenPlaces
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights, Linear
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads


class LayerSteps:
    """Adds a layer to a program.

    Args:
        operations: of layers, whose steps these are.
        attention: steps of attention.
        places: of the program.
        index: of the layer.
    """

    def __init__(
        self,
        operations: CpuLayer,
        attention: AttentionSteps,
        places: TokenPlaces,
        index: int,
        layer: StackLayer,
    ) -> None:
        self.operations, self.attention, self.places = operations, attention, places
        self.index, self.layer = index, layer
        self.n_tokens = places.n_tokens
        self.cache = places.given.caches[layer.rows]
        self.inputs = places.given.inputs[layer.positions]

    def add(self, x: Floats) -> Floats:
        """Returns where the layer's output is, one of the program's rows."""
        layer, places, weights = self.layer, self.places, self.layer.weights
        before = places.chain
        taken = 0 if before is None else before.n_bytes
        source = x
        mixed = [self._add_mixer(i, x) for i in range(len(layer.parts))]
        for y, (_, part_spec, part) in zip(mixed, layer.parts, strict=True):
            x = self._add_output(x, y, part_spec, part, places.free_row(source, x))
        if layer.spec.ffn is not None:
            x = self._add_ffn(x, source)
        if places.embedded is not None and weights.per_layer_input is not None:
            x = self._add_embedded(x)
        if weights.output_scale != 1.0:
            self._add_scale(x)
        if places.chain is not None:
            places.chain.take_again(taken if places.chain is before else 0)
        return x

    def _called(
        self, work: Callable[[Floats, Floats], Floats], x: Floats, source: Floats
    ) -> Floats:
        """What an operation of layers makes of two rows."""
        out = self.places.free_row(x, source)

        def call(given: TokenBatch) -> None:
            out[:] = work(x, source)

        self.places.call(call)
        return out

    def _add_mixer(self, part: int, x: Floats) -> Floats:
        kind, spec, weights = self.layer.parts[part]
        match spec.mixer:
            case AttentionSpec() as attn if self._has_attention(attn, weights):
                return self._add_attention(part, x, attn, weights)
            case LatentAttentionSpec() as latent if self._has_latents(weights):
                return self._add_latents(part, x, latent, weights)
            case DeltaNetSpec() | ShortConvSpec() | Mamba2Spec():
                if recurrent_layer.is_fused(weights, spec):
                    return self._add_recurrent(part, x, spec, weights)
        assert spec.mixer is not None
        out = self.places.buffer(f"mixed{part}", self.n_tokens, spec.mixer.width)
        mixer, layer = self.operations.mixers()[kind], self.layer

        def call(given: TokenBatch) -> None:
            inputs, cache = given.inputs[layer.positions], given.caches[layer.rows]
            out[:] = mixer(x, weights, spec, inputs, cache, given.batch)

        self.places.call(call)
        return out

    def _has_attention(self, attn: AttentionSpec, weights: LayerWeights) -> bool:
        """Whether a chain can run all of its steps."""
        return (
            self.operations.attention.is_fused(weights, attn)
            and is_stored_at_once(self.cache)
            and len(self.cache.segments) <= MOST_PARTS
            and self.inputs.q_scale is None
            and attn.key_dim == attn.value_dim
            and attn.key_dim % LANES == 0
        )

    def _has_latents(self, weights: LayerWeights) -> bool:
        return (
            latent_layer.is_fused(weights)
            and is_stored_at_once(self.cache)
            and len(self.cache.segments) <= MOST_PARTS
        )

    def _add_attention(
        self, part: int, x: Floats, attn: AttentionSpec, weights: LayerWeights
    ) -> Floats:
        places, chain, cache = self.places, self.places.steps(), self.cache
        n = self.n_tokens
        shape = n, attn.n_heads, attn.key_dim
        q = places.buffer("q", *shape)
        named: dict[str, int | Where] = {
            "x": x,
            "q": q,
            "k": chain.take(4 * n * attn.n_kv_heads * attn.key_dim),
            "v": chain.take(4 * n * attn.n_kv_heads * attn.value_dim),
            **places.inputs(self.layer.positions),
            **places.stored(cache),
        }
        gate = places.buffer(f"gate{part}", n, attn.width) if attn.gated else None
        if gate is not None:
            named["gate"] = gate
        chain.bind(**named)
        stored = None if attn.kv_from is not None else cache
        self.operations.attention.add_projections(chain, n, weights, attn, self.inputs, stored)
        sums = [self._add_sums(part, i, chain, q, attn) for i in range(len(cache.segments))]
        (out, lse), sinks = sums[0], weights.attention.sinks
        if len(sums) > 1:
            add_merge(chain, sums, sinks, shape)
        elif sinks is not None:
            add_sinks(chain, out, lse, sinks, shape)
        if gate is None:
            return out.reshape(n, attn.width)
        add_gate(chain, gate, out, n, attn)
        return gate

    def _add_sums(
        self, part: int, index: int, chain: Chain, q: Floats, attn: AttentionSpec
    ) -> tuple[Floats, Floats]:
        """Attention over one segment, and its log-sum-exp."""
        places, cache = self.places, self.cache
        segment = cache.segments[index]
        # what is not seen is not written, so segments have places of their own
        out = places.buffer(f"out{part} of {cache.part + index}", *q.shape)
        lse = places.buffer(f"lse of {cache.part + index}", self.n_tokens, attn.n_heads)
        turned = self._rotated(chain, q, segment.rotation_k, "turned q")
        self.attention.add(chain, turned, out, lse, cache, index, attn.params)
        return self._rotated(chain, out, segment.rotation_v, f"turned{part} of {index}"), lse

    def _add_latents(
        self, part: int, x: Floats, attn: LatentAttentionSpec, weights: LayerWeights
    ) -> Floats:
        places, chain, cache = self.places, self.places.steps(), self.cache
        n, latents = self.n_tokens, self.operations.latents
        shape = n, attn.n_heads, attn.latent_dim
        q, out = places.buffer("absorbed", *shape), places.buffer(f"mixed{part}", n, attn.width)
        rotated = places.buffer("rotated", n, attn.n_heads, attn.rope_dim)
        named: dict[str, int | Where] = {
            "x": x,
            "absorbed": q,
            "rotated": rotated,
            "latent": chain.take(4 * n * attn.latent_dim),
            "key": chain.take(4 * n * attn.rope_dim),
            **places.inputs(self.layer.positions),
            **places.stored(cache),
        }
        chain.bind(**named)
        latents.add_queries(chain, n, weights, attn, self.inputs, cache)
        parts = [
            self._add_latent_sums(i, chain, q, rotated, attn) for i in range(len(cache.segments))
        ]
        if len(parts) > 1:
            add_merge(chain, parts, None, shape)
        chain.bind(sums=parts[0][0], out=out)
        mixer = weights.mixer
        assert isinstance(mixer, LatentAttentionWeights)
        latents.add_values(chain, n, mixer.attn_v_b, attn)
        return out

    def _add_latent_sums(
        self, index: int, chain: Chain, q: Floats, rotated: Floats, attn: LatentAttentionSpec
    ) -> tuple[Floats, Floats]:
        """Sums of the latents of one segment, and their log-sum-exp."""
        places, cache = self.places, self.cache
        segment = cache.segments[index]
        # as in `_add_sums`
        sums = places.buffer(f"sums of {cache.part + index}", *q.shape)
        lse = places.buffer(f"lse of {cache.part + index}", self.n_tokens, attn.n_heads)
        q = self._rotated(chain, q, segment.rotation_k, "turned q")
        rotated = self._rotated(chain, rotated, segment.rotation_v, "turned part")
        self.attention.add_latents(chain, q, rotated, sums, lse, cache, index, attn.params)
        return self._rotated(chain, sums, segment.rotation_k, f"turned sums of {index}"), lse

    def _rotated(self, chain: Chain, x: Floats, block: int, name: str) -> Floats:
        """Rows rotated to a place of their own."""
        if block == 0:
            return x
        out = self.places.buffer(name, *x.shape)
        job = RotateJob(0, x.size // block, block, Memory(x, x.nbytes), Memory(out, x.nbytes))
        chain.add(worker_of("store/rotate_rows"), job, 1)
        return out

    def _add_recurrent(
        self, part: int, x: Floats, spec: LayerSpec, weights: LayerWeights
    ) -> Floats:
        places, chain, state = self.places, self.places.steps(), self.cache.state
        assert state is not None
        assert spec.mixer is not None
        out = places.buffer(f"mixed{part}", self.n_tokens, spec.mixer.width)
        places.states = state.data
        chain.bind(x=x, out=out, starts=places.start_table, slots=places.slots, states=state.data)
        self.operations.recurrent.add(
            chain, self.n_tokens, places.n_sequences, weights, spec, state
        )
        return out

    def _add_output(
        self, x: Floats, mixed: Floats, spec: LayerSpec, weights: LayerWeights, out: Floats
    ) -> Floats:
        operations = self.operations
        assert weights.mixer is not None
        output, post_norm = weights.mixer.output, weights.post_attn_norm
        if not operations.has_output(weights):
            return self._called(lambda x, _: operations.out_residual(x, mixed, weights, spec), x, x)
        chain = self.places.steps()
        before = self._with_bias(chain, x, output, out, at_once=adds_at_once(post_norm, spec))
        chain.bind(mixed=mixed, residual=before, out=out)
        operations.chains.add_residual(chain, "mixed", self.n_tokens, output, post_norm, spec)
        return out

    def _with_bias(
        self, chain: Chain, x: Floats, last: Linear, out: Floats, *, at_once: bool
    ) -> Floats:
        """What a block is added to: x, with the bias of the block's last product if that adds to
        x as it goes."""
        if last.bias is None or not at_once:
            return x
        chain.bind()
        one = self.operations.chains.floats(1.0)
        for before, after in zip(x, out, strict=True):
            n_bytes = before.nbytes
            rows = Memory(last.bias, n_bytes), 0, 0, one, Memory(before, n_bytes)
            job = ResidualJob(0, 1, x.shape[1], *rows, Memory(after, n_bytes))
            chain.add(specialized(RESIDUALS)["residual"], job, 1)
        return out

    def _add_ffn(self, x: Floats, source: Floats) -> Floats:
        operations, spec, weights = self.operations, self.layer.spec, self.layer.weights
        assert spec.ffn is not None
        if weights.moe is not None and operations.experts.has(weights):
            return self._add_experts(x, source)
        if not isinstance(spec.ffn, MlpSpec) or not operations.has_mlp(weights, spec):
            block = operations.ffns()[type(spec.ffn)]
            return self._called(lambda x, source: block(x, source, weights, spec), x, source)
        chain, out = self.places.steps(), self.places.free_row(x, source)
        read = source if spec.parallel else x
        down = down_of(weights)
        before = self._with_bias(
            chain, x, down, out, at_once=adds_at_once(weights.post_ffn_norm, spec)
        )
        chain.bind(x=read, residual=before, out=out)
        operations.add_mlp(chain, self.n_tokens, weights, spec)
        return out

    def _add_experts(self, x: Floats, source: Floats) -> Floats:
        experts, spec = self.operations.experts, self.layer.spec
        chain, out = self.places.steps(), self.places.free_row(x, source)
        routed = {"routed": source} if experts.reads_input(spec) else {}
        chain.bind(x=source if spec.parallel else x, residual=x, out=out, **routed)
        experts.add(chain, self.n_tokens, self.layer.weights, spec)
        return out

    def _add_embedded(self, x: Floats) -> Floats:
        operations, spec, weights = self.operations, self.layer.spec, self.layer.weights
        embedded = self.places.embedded
        assert embedded is not None
        row = embedded[self.index]
        if not operations.has_layer_input(weights, row.shape[-1]):
            return self._called(
                lambda x, _: operations.add_layer_input(x, row, weights, spec), x, x
            )
        chain, out = self.places.steps(), self.places.free_row(x)
        chain.bind(residual=x, row=row, out=out)
        operations.add_embedded(chain, self.n_tokens, weights, spec)
        return out

    def _add_scale(self, x: Floats) -> None:
        """x times the layer's factor, in place."""
        factor = self.layer.weights.output_scale
        parameters = self.operations.chains.floats(factor)
        job = ActivationJob(0, len(x), x.shape[1], Memory(x, x.nbytes), 0, parameters)
        chain = self.places.steps()
        chain.bind()
        chain.add(specialized(ROW_STEPS)["scaled"], job, min(n_threads(), len(x)))
