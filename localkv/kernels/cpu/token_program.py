"""All layers for one generated token, as one chain.

Between chains Python has to fill in addresses, helpers of other threads may fall asleep, and what
it needs has left the caches, as each token reads all weights. So everything that a token's layers
work on has a place that stays, and steps of all layers are one chain. What no chain can run is
called in between (`TokenProgram.stages`). Workers and their order are those of layers that run one
by one, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.arch.ffn_spec import MlpSpec
from localkv.arch.mixer_spec import AttentionSpec, DeltaNetSpec, Mamba2Spec, ShortConvSpec
from localkv.arch.spec import LayerSpec
from localkv.cache.layer_cache import LayerCache
from localkv.kernels.backend import StackLayer, TokenBatch, TokenInputs
from localkv.kernels.bounds import BoundsError, check_slots
from localkv.kernels.cpu import recurrent_layer
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.attention.kernels import worker_of
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.token_steps import AttentionSteps
from localkv.kernels.cpu.attention_layer import add_gate, add_sinks, is_stored_at_once
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layer import CpuLayer, down_of
from localkv.kernels.cpu.layer_chains import RESIDUALS, ROW_STEPS, adds_at_once
from localkv.kernels.cpu.linear.activation_job import ActivationJob, ResidualJob
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Where
from localkv.kernels.cpu.store.job import RotateJob
from localkv.kernels.layer_weights import LayerWeights, Linear
from localkv.simd.lanes import LANES
from localkv.system.threads import n_threads

Call = Callable[[TokenBatch], None]
"""What is done between chains, in the places of a program."""
Int64s = NDArray[np.int64]
MANY_PROGRAMS = 4
"""The most that are remembered."""


class TokenProgram:
    """The layers of a model for one token of one sequence.

    Args:
        operations: of layers, whose steps these are.
        attention: steps of attention.
        layers: of the model.
        given: a token's, whose caches these are; of its inputs only sizes matter.

    Attributes:
        stages: chains, and what is called between them, in order.
    """

    def __init__(
        self,
        operations: CpuLayer,
        attention: AttentionSteps,
        layers: tuple[StackLayer, ...],
        given: TokenBatch,
        n_embd: int,
    ) -> None:
        self.operations, self.attention = operations, attention
        self.layers, self.given = layers, given
        self.stages = list[Chain | Call]()
        self.chain: Chain | None = None
        self.rows = [np.zeros((1, n_embd), np.float32) for _ in range(3)]
        self.buffers = dict[tuple[str, tuple[int, ...]], Floats]()
        self.turns = {
            i: (one.rope, np.empty_like(one.rope.cos), np.empty_like(one.rope.sin))
            for i, one in enumerate(given.inputs)
            if one.rope is not None
        }
        self.embedded = None if given.embedded is None else np.empty_like(given.embedded)
        self.token, self.slot = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self.start_table = np.array([0, 1], np.int32)
        self.pools = dict[int, tuple[Int64s, int]]()
        self.states: NDArray[np.float32] | None = None
        x: Floats = self.rows[0]
        for index, layer in enumerate(layers):
            x = _LayerSteps(self, index, layer).add(x)
        self.out = x

    def run(self, x: Floats, given: TokenBatch) -> Floats | None:
        """x [1, n_embd] behind all layers; None if the token's attention is cut otherwise.

        Raises:
            BoundsError: the token is not of the caches that this was made for.
        """
        batch = given.batch
        for i, (_, cos, sin) in self.turns.items():
            rope = given.inputs[i].rope
            assert rope is not None
            cos[:], sin[:] = rope.cos, rope.sin
        for pool, (slot, n_pages) in self.pools.items():
            rows = batch.segments[pool]
            check_slots(rows, 1, n_pages)
            slot[:] = rows.slots
        if self.states is not None:
            self.slot[:] = batch.slots
            if not 0 <= int(self.slot[0]) < len(self.states):
                raise BoundsError(f"{len(self.states)} states of sequences, and slot {self.slot}")
        if not self.attention.prepare(batch):
            return None
        if self.embedded is not None:
            self.embedded[:] = given.embedded
        self.rows[0][:] = x
        for stage in self.stages:
            if isinstance(stage, Chain):
                stage.run()
            else:
                stage(given)
        return self.out.copy()

    def steps(self) -> Chain:
        """The chain to which steps are added."""
        if self.chain is None:
            self.chain = Chain(self.operations.chains.scratch)
            self.stages.append(self.chain)
        return self.chain

    def call(self, work: Call) -> None:
        """Do this behind the steps that were added, and before those that follow."""
        self.chain = None
        self.stages.append(work)

    def buffer(self, name: str, *shape: int) -> Floats:
        """Memory that stays, for what layers need one after the other."""
        if (name, shape) not in self.buffers:
            self.buffers[name, shape] = np.zeros(shape, np.float32)
        return self.buffers[name, shape]

    def slots_of(self, cache: LayerCache) -> Int64s:
        """Where the token's row of a pool is."""
        if cache.pool not in self.pools:
            n_pages = len(cache.segments[0].k[0])
            self.pools[cache.pool] = np.zeros(1, np.int64), n_pages
        return self.pools[cache.pool][0]


@dataclass(frozen=True)
class _Kept:
    """A program, and the numbers that it was made for, besides the objects that it keeps."""

    facts: tuple[object, ...]
    program: TokenProgram


class TokenPrograms:
    """As `Backend.run_layers` has it: programs of a backend's models.

    Args:
        operations: of layers.
        attention: over packed K and V.
    """

    def __init__(self, operations: CpuLayer, attention: PackedAttention) -> None:
        self.operations = operations
        self.attention = attention
        self.kept = dict[int, _Kept]()

    def forget(self) -> None:
        """Make all programs anew."""
        self.kept.clear()

    def __call__(
        self, x: Floats, layers: tuple[StackLayer, ...], given: TokenBatch
    ) -> Floats | None:
        batch = given.batch
        if (
            batch.generated != (True,)
            or len(x) != 1
            or len(batch.logit_rows) != 1
            or any(layer.spec.laurel is not None for layer in layers)
        ):
            return None
        facts = n_threads(), *map(_facts, given.inputs)
        kept = self.kept.get(id(layers))
        if (
            kept is None
            or kept.facts != facts
            or kept.program.layers is not layers
            or kept.program.given.caches is not given.caches
        ):
            if len(self.kept) >= MANY_PROGRAMS:
                self.kept.clear()
            self.kept.pop(id(layers), None)
            steps = AttentionSteps(self.attention, len(layers))
            program = TokenProgram(self.operations, steps, layers, given, x.shape[1])
            kept = self.kept[id(layers)] = _Kept(facts, program)
        return kept.program.run(x, given)


def _facts(inputs: TokenInputs) -> tuple[object, ...]:
    """What chains depend on, of a layer's inputs."""
    rope = inputs.rope
    turned = None if rope is None else (rope.cos.shape, rope.interleaved)
    return turned, inputs.q_scale is None


class _LayerSteps:
    """Adds a layer to a program."""

    def __init__(self, program: TokenProgram, index: int, layer: StackLayer) -> None:
        self.program, self.index, self.layer = program, index, layer
        self.operations = program.operations
        self.cache = program.given.caches[layer.rows]

    def add(self, x: Floats) -> Floats:
        """Returns where the layer's output is, one of the program's rows."""
        layer, spec, weights = self.layer, self.layer.spec, self.layer.weights
        before = self.program.chain
        taken = 0 if before is None else before.n_bytes
        source = x
        mixed = [self._add_mixer(i, x) for i in range(len(layer.parts))]
        for y, (_, part_spec, part) in zip(mixed, layer.parts, strict=True):
            x = self._add_output(x, y, part_spec, part, self._free(source, x))
        if spec.ffn is not None:
            x = self._add_ffn(x, source)
        if self.program.embedded is not None and weights.per_layer_input is not None:
            x = self._add_embedded(x)
        if weights.output_scale != 1.0:
            self._add_scale(x)
        if self.program.chain is not None:
            self.program.chain.take_again(taken if self.program.chain is before else 0)
        return x

    def _free(self, *taken: Floats) -> Floats:
        """A place for rows that is none of these."""
        return next(row for row in self.program.rows if all(row is not x for x in taken))

    def _called(
        self, work: Callable[[Floats, Floats], Floats], x: Floats, source: Floats
    ) -> Floats:
        """What an operation of layers makes of two rows."""
        out = self._free(x, source)

        def call(given: TokenBatch) -> None:
            out[:] = work(x, source)

        self.program.call(call)
        return out

    def _add_mixer(self, part: int, x: Floats) -> Floats:
        kind, spec, weights = self.layer.parts[part]
        attn, operations = spec.mixer, self.operations
        if isinstance(attn, AttentionSpec) and self._has_attention(attn, weights):
            return self._add_attention(part, x, attn, weights)
        recurrent = isinstance(attn, (DeltaNetSpec, ShortConvSpec, Mamba2Spec))
        if recurrent and recurrent_layer.is_fused(weights, spec):
            return self._add_recurrent(part, x, spec, weights)
        assert attn is not None
        out = self.program.buffer(f"mixed{part}", 1, attn.width)
        mixer, index = operations.mixers()[kind], self.layer

        def call(given: TokenBatch) -> None:
            inputs, cache = given.inputs[index.positions], given.caches[index.rows]
            out[:] = mixer(x, weights, spec, inputs, cache, given.batch)

        self.program.call(call)
        return out

    def _has_attention(self, attn: AttentionSpec, weights: LayerWeights) -> bool:
        """Whether a chain can run all of its steps."""
        inputs = self.program.given.inputs[self.layer.positions]
        return (
            self.operations.attention.is_fused(weights, attn)
            and len(self.cache.segments) == 1
            and is_stored_at_once(self.cache)
            and inputs.q_scale is None
            and attn.key_dim == attn.value_dim
            and attn.key_dim % LANES == 0
        )

    def _add_attention(
        self, part: int, x: Floats, attn: AttentionSpec, weights: LayerWeights
    ) -> Floats:
        program, chain, cache = self.program, self.program.steps(), self.cache
        inputs = program.given.inputs[self.layer.positions]
        (segment,) = cache.segments
        shape = 1, attn.n_heads, attn.key_dim
        q, out = program.buffer("q", *shape), program.buffer(f"out{part}", *shape)
        lse = program.buffer("lse", 1, attn.n_heads)
        places: dict[str, int | Where] = {
            "x": x,
            "q": q,
            "k": chain.take(4 * attn.n_kv_heads * attn.key_dim),
            "v": chain.take(4 * attn.n_kv_heads * attn.value_dim),
            "rows0": 1,
            "tokens0": program.token,
            "slots0": program.slots_of(cache),
        }
        gate = program.buffer(f"gate{part}", 1, attn.width) if attn.gated else None
        if gate is not None:
            places["gate"] = gate
        if inputs.rope is not None:
            _, places["cos"], places["sin"] = program.turns[self.layer.positions]
        chain.bind(**places)
        stored = None if attn.kv_from is not None else cache
        self.operations.attention.add_projections(chain, 1, weights, attn, inputs, stored)
        turned = self._rotated(chain, q, segment.rotation_k, "turned q")
        program.attention.add(chain, turned, out, lse, cache, attn.params)
        out = self._rotated(chain, out, segment.rotation_v, f"turned{part}")
        sinks = weights.attention.sinks
        if sinks is not None:
            add_sinks(chain, out, lse, sinks, shape)
        if gate is None:
            return out.reshape(1, attn.width)
        add_gate(chain, gate, out, 1, attn)
        return gate

    def _rotated(self, chain: Chain, x: Floats, block: int, name: str) -> Floats:
        """Rows rotated to a place of their own."""
        if block == 0:
            return x
        out = self.program.buffer(name, *x.shape)
        job = RotateJob(0, x.size // block, block, Memory(x, x.nbytes), Memory(out, x.nbytes))
        chain.add(worker_of("store/rotate_rows"), job, 1)
        return out

    def _add_recurrent(
        self, part: int, x: Floats, spec: LayerSpec, weights: LayerWeights
    ) -> Floats:
        program, chain, state = self.program, self.program.steps(), self.cache.state
        assert state is not None
        assert spec.mixer is not None
        out = program.buffer(f"mixed{part}", 1, spec.mixer.width)
        program.states = state.data
        chain.bind(x=x, out=out, starts=program.start_table, slots=program.slot, states=state.data)
        self.operations.recurrent.add(chain, 1, 1, weights, spec, state)
        return out

    def _add_output(
        self, x: Floats, mixed: Floats, spec: LayerSpec, weights: LayerWeights, out: Floats
    ) -> Floats:
        operations = self.operations
        assert weights.mixer is not None
        output, post_norm = weights.mixer.output, weights.post_attn_norm
        if not operations.has_output(weights):
            return self._called(lambda x, _: operations.out_residual(x, mixed, weights, spec), x, x)
        chain = self.program.steps()
        before = self._with_bias(chain, x, output, out, at_once=adds_at_once(post_norm, spec))
        chain.bind(mixed=mixed, residual=before, out=out)
        operations.chains.add_residual(chain, "mixed", 1, output, post_norm, spec)
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
        n_bytes = x.nbytes
        rows = Memory(last.bias, n_bytes), 0, 0, one, Memory(x, n_bytes), Memory(out, n_bytes)
        chain.add(specialized(RESIDUALS)["residual"], ResidualJob(0, 1, x.shape[1], *rows), 1)
        return out

    def _add_ffn(self, x: Floats, source: Floats) -> Floats:
        operations, spec, weights = self.operations, self.layer.spec, self.layer.weights
        assert spec.ffn is not None
        if weights.moe is not None and operations.experts.has(weights):
            return self._add_experts(x, source)
        if not isinstance(spec.ffn, MlpSpec) or not operations.has_mlp(weights, spec):
            block = operations.ffns()[type(spec.ffn)]
            return self._called(lambda x, source: block(x, source, weights, spec), x, source)
        chain, out = self.program.steps(), self._free(x, source)
        read = source if spec.parallel else x
        down = down_of(weights)
        before = self._with_bias(
            chain, x, down, out, at_once=adds_at_once(weights.post_ffn_norm, spec)
        )
        chain.bind(x=read, residual=before, out=out)
        operations.add_mlp(chain, 1, weights, spec)
        return out

    def _add_experts(self, x: Floats, source: Floats) -> Floats:
        experts, spec = self.operations.experts, self.layer.spec
        chain, out = self.program.steps(), self._free(x, source)
        routed = {"routed": source} if experts.reads_input(spec) else {}
        chain.bind(x=source if spec.parallel else x, residual=x, out=out, **routed)
        experts.add(chain, 1, self.layer.weights, spec)
        return out

    def _add_embedded(self, x: Floats) -> Floats:
        operations, spec, weights = self.operations, self.layer.spec, self.layer.weights
        embedded = self.program.embedded
        assert embedded is not None
        row = embedded[self.index]
        if not operations.has_layer_input(weights, row.shape[-1]):
            return self._called(
                lambda x, _: operations.add_layer_input(x, row, weights, spec), x, x
            )
        chain, out = self.program.steps(), self._free(x)
        chain.bind(residual=x, row=row, out=out)
        operations.add_embedded(chain, 1, weights, spec)
        return out

    def _add_scale(self, x: Floats) -> None:
        """x times the layer's factor, in place."""
        factor = self.layer.weights.output_scale
        parameters = self.operations.chains.floats(factor)
        job = ActivationJob(0, 1, x.shape[1], Memory(x, x.nbytes), 0, parameters)
        chain = self.program.steps()
        chain.bind()
        chain.add(specialized(ROW_STEPS)["scaled"], job, 1)
