"""All layers for one generated token, or for a few, and their logits, as one chain.

Between chains Python has to fill in addresses, helpers of other threads may fall asleep, and what
it needs has left the caches, as each token reads all weights. So everything that a token's layers
work on has a place that stays, and steps of all layers are one chain. What no chain can run is
called in between (`TokenProgram.stages`). Workers and their order, and so the bits, are the same as
in layers that run one by one. Tokens are of one text, as guesses are, or of several.

A draft's guesses run a program of one token again and again, with no Python in between:

After each token a worker takes the most probable one and writes what the chain reads of the next
(`linear/guess.py`). That is its row of the embedding, its rotations, and the items that say where
its rows go and how many there are. Each item is one more than before as long as the page is the
same.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localkv.arch.spec import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MlpSpec,
    ShortConvSpec,
)
from localkv.cache.arrays import Batch, LayerCache
from localkv.kernels.backend import (
    Guessed,
    Guessing,
    Head,
    MovedBatch,
    StackLayer,
    TokenBatch,
    TokenInputs,
    capped_logits,
)
from localkv.kernels.bounds import BoundsError, check_slots
from localkv.kernels.cpu.arrays import Floats, address
from localkv.kernels.cpu.attention.kernels import worker_of
from localkv.kernels.cpu.attention.latent_attention import LatentAttention
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.program import AttentionSteps
from localkv.kernels.cpu.jit.kernel_source import KernelSource
from localkv.kernels.cpu.jit.specialize import specialized
from localkv.kernels.cpu.layers import latents, recurrent
from localkv.kernels.cpu.layers.attention import (
    add_gate,
    add_merge,
    add_sinks,
    gate_width,
    is_stored_at_once,
)
from localkv.kernels.cpu.layers.chains import FEW_TOKENS, RESIDUALS, ROW_STEPS, adds_at_once, runs
from localkv.kernels.cpu.layers.layer import CpuLayer, down_of
from localkv.kernels.cpu.linear.embedding import Embedding
from localkv.kernels.cpu.linear.jobs import (
    IS_OVER,
    MOST_PARTS,
    N_EVALUATED,
    N_GUESSED,
    ActivationJob,
    GuessJob,
    ResidualJob,
)
from localkv.kernels.cpu.linear.late_panels import LatePanels
from localkv.kernels.cpu.linear.products import add_products, with_bias
from localkv.kernels.cpu.runtime.chain import Chain, Memory, Scratch, Where
from localkv.kernels.cpu.store.jobs import RotateJob
from localkv.kernels.cpu.store.store_kv import check_groups, group_tokens
from localkv.kernels.layer_weights import LatentAttentionWeights, LayerWeights, Linear
from localkv.kernels.rope import NEARBY
from localkv.simd import LANES
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
                if recurrent.is_fused(weights, spec):
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
            and attn.output_scale == 1.0
            and attn.key_dim % LANES == 0
        )

    def _has_latents(self, weights: LayerWeights) -> bool:
        return (
            latents.is_fused(weights)
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
        gate = None
        if width := gate_width(attn):
            gate = places.buffer(f"gate{part}", n, width)
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
        if gate is not None:
            add_gate(chain, gate, out, n, attn)
        return out.reshape(n, attn.width)

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
        gate: dict[str, int | Where] = {}
        if attn.head_gated:
            gate["gate"] = places.buffer(f"gate{part}", n, attn.n_heads)
        named: dict[str, int | Where] = {
            "x": x,
            "absorbed": q,
            "rotated": rotated,
            "latent": chain.take(4 * n * attn.latent_dim),
            "key": chain.take(4 * n * attn.rope_dim),
            **gate,
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
        chain.bind(sums=parts[0][0], out=out, **gate)
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
        chain.bind(
            x=x,
            out=out,
            starts=places.start_table,
            slots=places.slots,
            after=places.after,
            states=state.data,
        )
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
        y = operations.chains.add_norm(chain, self.n_tokens, weights.mixed_norm, "mixed")
        operations.chains.add_residual(chain, y, self.n_tokens, output, post_norm, spec)
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


Call = Callable[[TokenBatch], None]
"""What is done between chains, in these places."""
Int64s = NDArray[np.int64]


class TokenPlaces:
    """The places of a program.

    Args:
        scratch: of chains.
        given: the tokens'; of its inputs only sizes matter.

    Attributes:
        n_tokens, n_sequences: of the batch.
        stages: chains, and what is called between them, in order.
        rows: three of [n_tokens, n_embd]; one has a layer's input, one its output.
        entries: [1, n_embd] of each token, where the first layer's input is.
        embedded: as `TokenBatch` has it.
        states: of recurrent layers, float32 [slots, n].
    """

    def __init__(self, scratch: Scratch, given: TokenBatch, n_embd: int) -> None:
        self.scratch, self.given = scratch, given
        self.n_tokens, self.n_sequences = given.batch.starts[-1], len(given.batch.generated)
        self.stages = list[Chain | Call]()
        self.chain: Chain | None = None
        self.rows = [np.zeros((self.n_tokens, n_embd), np.float32) for _ in range(3)]
        self.embedded = None if given.embedded is None else np.empty_like(given.embedded)
        self.start_table = np.array(given.batch.starts, np.int32)
        self.slots, self.no_rows = np.zeros(self.n_sequences, np.int64), np.zeros(1, np.int64)
        self.after = np.zeros(self.n_tokens, np.int64)
        self.states: NDArray[np.float32] | None = None
        self._buffers = dict[tuple[str, tuple[int, ...]], Floats]()
        self._pools = dict[int, tuple[Int64s, Int64s, int]]()
        self._groups = dict[int, tuple[Int64s, tuple[int, int, int]]]()
        self._inputs = [_copied(one) for one in given.inputs]
        self.entries = [self.rows[0][i : i + 1] for i in range(self.n_tokens)]
        self._rotation_places = [
            [(one["cos"][i].data, one["sin"][i].data) for i in range(self.n_tokens)]
            if "cos" in one
            else []
            for one in self._inputs
        ]

    def steps(self) -> Chain:
        """The chain to which steps are added."""
        if self.chain is None:
            self.chain = Chain(self.scratch)
            self.stages.append(self.chain)
        return self.chain

    def call(self, work: Call) -> None:
        """Do this after the steps that were added, and before the ones that follow."""
        self.chain = None
        self.stages.append(work)

    def buffer(self, name: str, *shape: int) -> Floats:
        """Memory for what layers need one after the other."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = np.zeros(shape, np.float32)
        return self._buffers[name, shape]

    def free_row(self, *taken: Floats) -> Floats:
        """One of the rows that is none of these."""
        return next(row for row in self.rows if all(row is not x for x in taken))

    def inputs(self, positions: int) -> dict[str, Where]:
        """Places of what a kind of layers is given of a token, by the names of chains."""
        return dict(self._inputs[positions])

    def stored(self, cache: LayerCache) -> dict[str, int | Where]:
        """Where the tokens' rows go in the segments that they are stored in, by the names of
        chains."""
        found = dict[str, int | Where]()
        for i, rows in enumerate(cache.rows_of(self.given.batch)):
            part, n_rows = cache.part + i, len(rows.slots)
            if rows.groups is not None:
                if part not in self._groups:
                    packed, tail = cache.segments[i], cache.segments[-1]
                    sizes = group_tokens(packed), len(packed.k[0]), len(tail.k[0])
                    self._groups[part] = np.full((self.n_tokens, 2), -1, np.int64), sizes
                found |= {f"n_groups{i}": self.n_tokens, f"groups{i}": self._groups[part][0]}
                continue
            if n_rows and part not in self._pools:
                tokens, slots = np.zeros((2, n_rows), np.int64)
                self._pools[part] = tokens, slots, len(cache.segments[i].k[0])
            tokens, slots, _ = self._pools[part] if n_rows else (self.no_rows, self.no_rows, 0)
            found |= {f"rows{i}": n_rows, f"tokens{i}": tokens, f"slots{i}": slots}
        return found

    def fill_next(self, moved: MovedBatch, more: Sequence[int]) -> None:
        """Fill all but x.

        Views of memory, and items one by one: to copy arrays NumPy reads more of its own code and
        data, and none of it is in a cache here.

        Args:
            more: how far each token comes after the one before.
        """
        for places, rotations in zip(self._rotation_places, moved.rotations, strict=True):
            if rotations is not None:
                for position, place in zip(moved.positions, places, strict=True):
                    rotations.put(position, *place)
        for pool, (tokens, slots, _) in self._pools.items():
            before = moved.before.segments[pool].slots
            for i in range(len(slots)):
                slots[i] = int(before[i]) + more[tokens[i]]

    def fill(self, x: Floats, given: TokenBatch) -> None:
        """Write what differs from batch to batch.

        Raises:
            BoundsError: the tokens are not of the caches that this was made for.
        """
        batch = given.batch
        for places, one in zip(self._inputs, given.inputs, strict=True):
            for name, values in _arrays(one).items():
                places[name][:] = values
        for pool, (tokens, slots, n_pages) in self._pools.items():
            rows = batch.segments[pool]
            check_slots(rows, self.n_tokens, n_pages)
            tokens[:], slots[:] = rows.tokens, rows.slots
        for part, (group, sizes) in self._groups.items():
            groups = batch.segments[part].groups
            assert groups is not None
            check_groups(groups, *sizes)
            group.fill(-1)
            group[: len(groups)] = groups
        if self.states is not None:
            self.slots[:] = batch.slots
            if not 0 <= int(self.slots.min()) <= int(self.slots.max()) < len(self.states):
                raise BoundsError(f"{len(self.states)} states of sequences, and slots {self.slots}")
            recurrent.check_after(batch, len(self.states))
            self.after[:] = batch.after
        if given.embedded is not None:
            self.fill_embedded(given.embedded)
        self.rows[0][:] = x

    def growing(self) -> list[int]:
        """Addresses of the items that are one more for the token after this one, in the page."""
        return [address(slots) for _, slots, _ in self._pools.values()]

    def turns(self, moved: MovedBatch, n: int) -> list[tuple[int, int, int]] | None:
        """Tables of the rotations of one token.

        For each there are its address, the address of the same values with the ones of the `n` - 1
        tokens after it, and how many floats a token has. None if tokens differ in other places,
        too.
        """
        if self._groups or self.states is not None or self.embedded is not None:
            return None
        found = list[tuple[int, int, int]]()
        for one, rotations in zip(self._inputs, moved.rotations, strict=True):
            if rotations is not None:
                table = rotations.following(moved.positions[0], n)
                for name, rows in (("cos", table.cos), ("sin", table.sin)):
                    found.append((address(one[name]), address(rows), rows.shape[1]))
        return found

    def fill_embedded(self, embedded: Floats) -> None:
        """Write what layers read of each token."""
        assert self.embedded is not None
        self.embedded[:] = embedded


def _arrays(inputs: TokenInputs) -> dict[str, Floats]:
    """The arrays of tokens, by the names of chains."""
    found = dict[str, Floats]()
    if inputs.rope is not None:
        found |= {"cos": inputs.rope.cos, "sin": inputs.rope.sin}
    if inputs.q_scale is not None:
        found["q_scale"] = inputs.q_scale
    return found


def _copied(inputs: TokenInputs) -> dict[str, Floats]:
    return {name: np.array(x, np.float32) for name, x in _arrays(inputs).items()}


GUESS = KernelSource("linear/guess")
MOST_ITEMS = 64
"""That are one more for each token, or pieces of memory that are cleared; few layers need any of
their own."""


class TokenGuesses:
    """Runs the chain of a program.

    Args:
        places: of the program, whose only stage is a chain.
        attention: steps of attention in it.
        n_vocab: logits of a token.
        name: of the logits in the chain.
    """

    def __init__(
        self, places: TokenPlaces, attention: AttentionSteps, n_vocab: int, name: str
    ) -> None:
        self.places, self.attention = places, attention
        self.logits: dict[str, Floats] = {name: np.empty((1, n_vocab), np.float32)}
        self.given, self.tokens = np.zeros((2, NEARBY), np.int64)
        self.probabilities, self.limits = np.zeros(NEARBY, np.float32), np.zeros(2, np.float32)
        self.grow, self.clear = np.zeros(MOST_ITEMS, np.int64), np.zeros((MOST_ITEMS, 2), np.int64)
        self.turns = np.zeros((0, 3), np.int64)
        self.job = np.zeros(len(GuessJob._fields), np.int64)
        self.worker = specialized(GUESS)["worker"]
        self._guessing: Guessing | None = None
        self._tables = [np.zeros(0, np.float32)] * 3
        self._table_places = dict[str, int]()
        likely, (logits,) = address(self.limits), self.logits.values()
        self._places = {
            "given": address(self.given),
            "logits": address(logits),
            "tokens": address(self.tokens),
            "probabilities": address(self.probabilities),
            "likely": likely,
            "p_min": likely + 4,
            "grow": address(self.grow),
            "clear": address(self.clear),
        }
        self._n_vocab, self._address = n_vocab, address(self.job)

    def run(
        self, moved: MovedBatch, more: Sequence[int], guessing: Guessing, embedding: Embedding
    ) -> Guessed | None:
        """Guess the tokens after one whose places are filled; see `RunGuesses`.

        Raises:
            BoundsError: a token is not in the vocabulary.
        """
        given, n_rows = [*moved.token_ids, *more], moved.token_embd.shape[0]
        if not 0 <= min(given) <= max(given) < n_rows:
            raise BoundsError(f"tokens {given}, and {n_rows} of them")
        row = embedding.row_job(moved.token_embd, moved.scale, self.places.entries[0])
        n = min(guessing.most + len(given) - 1, NEARBY)
        turns, growing = self.places.turns(moved, n), self.attention.growing(moved.before)
        if row is None or turns is None or growing is None:
            return None
        items, cleared = growing
        items = [*items, *self.places.growing()]
        most = n - len(given) + 1
        if most < 1 or max(len(items), len(cleared)) > MOST_ITEMS:
            return None
        self.given[: len(given)], self.grow[: len(items)] = given, items
        for i, (at, n) in enumerate(cleared):
            self.clear[i] = at, n
        self.turns = np.array(turns, np.int64).reshape(-1, 3)
        self.limits[:] = 1.0, guessing.p_min
        self.job[:] = GuessJob(
            next_piece=0,
            is_over=0,
            n_evaluated=0,
            n_given=len(given),
            n_guessed=0,
            most=most,
            n_vocab=min(guessing.n_vocab, self._n_vocab),
            n_bounds=len(guessing.bounds),
            row_worker=row.worker,
            row_job=row.job,
            row_item=row.item,
            first_row=row.first,
            row_bytes=row.row_bytes,
            n_grow=len(items),
            n_clear=len(cleared),
            n_turns=len(self.turns),
            turns=address(self.turns),
            **self._places,
            **self._tables_of(guessing),
        )
        at = self._address
        (chain,) = self.places.stages
        assert isinstance(chain, Chain)
        started = time.perf_counter()
        chain.run_rounds(self.worker, at, at + 8 * IS_OVER, **self.logits)
        n, n_evaluated = int(self.job[N_GUESSED]), int(self.job[N_EVALUATED])
        return Guessed(
            self.tokens[:n].tolist(),
            self.probabilities[:n].tolist(),
            n_evaluated,
            (time.perf_counter() - started) / n_evaluated,
        )

    def _tables_of(self, guessing: Guessing) -> dict[str, int]:
        """Addresses of its numbers, which are copied only if it is another one."""
        if guessing is not self._guessing:
            names = "bounds", "chances", "least"
            tables = [(*getattr(guessing, name), 0.0) for name in names]
            self._tables = [np.array(table, np.float32) for table in tables]
            places = map(address, self._tables)
            self._table_places = dict(zip(names, places, strict=True))
            self._guessing = guessing
        return self._table_places


LOGITS = "logits"
"""The name of the last chain's output, which is the caller's."""
MANY_PROGRAMS = 2 * FEW_TOKENS
"""The most that are remembered."""


class TokenProgram:
    """The layers of a model for a number of tokens.

    Args:
        operations: of layers, whose steps these are.
        attention: steps of attention.
        layers: of the model.
        given: the tokens', whose caches these are; of its inputs only sizes matter.

    Attributes:
        last: the batch that was run last, if its tokens can be moved on (`run_next`).
        positions: of its tokens.
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
        self.layers, self.caches = layers, given.caches
        self.places = TokenPlaces(operations.chains.scratch, given, n_embd)
        x = self.places.rows[0]
        for index, layer in enumerate(layers):
            x = LayerSteps(operations, attention, self.places, index, layer).add(x)
        self.out = x
        self.head: Head | None = None
        self.last: Batch | None = None
        self.positions = list[int]()
        self._guesses: TokenGuesses | None = None
        if given.head is not None and runs(given.head.output):
            self._add_head(given.head)

    def _add_head(self, head: Head) -> None:
        """The steps of `CpuLayer.logits`."""
        chain, chains = self.places.steps(), self.operations.chains
        n_tokens = self.places.n_tokens
        chain.bind()
        h = chains.add_norm(chain, n_tokens, head.norm, self.out)
        add_products(chain, h, n_tokens, [with_bias(head.output, LOGITS)])
        self.head = head

    def run(self, x: Floats, given: TokenBatch) -> Floats | None:
        """x [tokens, n_embd] after all layers, or the logits; None if attention is cut otherwise.

        Raises:
            BoundsError: the tokens are not of the caches that this was made for.
        """
        self.last = None
        if not self.attention.prepare(given.batch):
            return None
        if self.head is not None and len(self.places.stages) == 1:
            self.last, self.positions = given.batch, given.batch.positions.tolist()
        self.places.fill(x, given)
        for stage in self.places.stages[: -1 if self.head else None]:
            if isinstance(stage, Chain):
                stage.run()
            else:
                stage(given)
        if self.head is not None:
            return self.logits(self.head)
        if given.head is not None:
            return self.operations.logits(self.out, *given.head)
        return self.out.copy()

    def run_guesses(
        self, moved: MovedBatch, more: Sequence[int], guessing: Guessing, embedding: Embedding
    ) -> Guessed | None:
        """Run a draft, as `Backend.run_guesses` has it, in a program of one token."""
        head = self.head
        if head is None or head.spec.logit_scale != 1.0 or head.spec.logit_softcap:
            return None
        if not self.move(moved, embedding):
            return None
        if self._guesses is None:
            n_vocab = head.output.weight.shape[0]
            self._guesses = TokenGuesses(self.places, self.attention, n_vocab, LOGITS)
        return self._guesses.run(moved, more, guessing, embedding)

    def move(self, moved: MovedBatch, embedding: Embedding) -> bool:
        """Fill the places with tokens that follow the tokens of `last`, whose rows go to the same
        pages; False if their attention is cut otherwise."""
        if self.last is None:
            return False
        more = list(map(operator.sub, moved.positions, self.positions))
        if not self.attention.move(self.last, moved.positions, more):
            self.last = None
            return False
        self.places.fill_next(moved, more)
        for token, entry in zip(moved.token_ids, self.places.entries, strict=True):
            embedding.put(token, moved.token_embd, moved.scale, entry)
        if moved.embedded is not None:
            self.places.fill_embedded(moved.embedded(self.places.rows[0]))
        return True

    def logits(self, head: Head) -> Floats:
        """Run the last chain, which is the only one after `move`."""
        last, shape = self.places.stages[-1], (self.places.n_tokens, head.output.weight.shape[0])
        out = np.empty(shape, np.float32)
        assert isinstance(last, Chain)
        last.run(**{LOGITS: out})
        return np.asarray(capped_logits(out, head.spec))

    def is_for(self, layers: tuple[StackLayer, ...], given: TokenBatch) -> bool:
        """Whether it is for tokens of this model, with these caches."""
        head, wanted = self.head or (), given.head or ()
        same_head = all(a is b for a, b in zip(head, wanted, strict=False))
        return self.layers is layers and self.caches is given.caches and same_head


@dataclass(frozen=True)
class _Kept:
    """A program, the objects that it keeps, and the numbers that it was made for."""

    facts: tuple[object, ...]
    program: TokenProgram


class TokenPrograms:
    """Programs of a backend's models, for `Backend.run_layers`.

    Args:
        operations: of layers.
        attention, latents: over packed K and V, and over packed latents.
        embedding: of tokens.
        late: weights that are laid out while the first tokens run.
    """

    def __init__(
        self,
        operations: CpuLayer,
        attention: PackedAttention,
        latents: LatentAttention,
        embedding: Embedding,
        late: LatePanels,
    ) -> None:
        self.operations, self.embedding, self.late = operations, embedding, late
        self.attention, self.latents = attention, latents
        self.kept = dict[tuple[object, ...], _Kept]()
        self._ran: TokenProgram | None = None

    def forget(self) -> None:
        """Drop all programs, so that they are made again."""
        self.kept.clear()
        self._ran = None

    def behind_layers(self) -> Floats:
        """See `Backend.behind_layers`."""
        assert self._ran is not None
        return self._ran.out

    def run_next(self, layers: tuple[StackLayer, ...], moved: MovedBatch) -> Floats | None:
        """Run tokens that differ little from the batch before; see `Backend.run_next`."""
        program = self._last(layers, moved)
        if program is None or program.head is None or not program.move(moved, self.embedding):
            return None
        self._ran = program
        return program.logits(program.head)

    def run_guesses(
        self,
        layers: tuple[StackLayer, ...],
        moved: MovedBatch,
        more: Sequence[int],
        guessing: Guessing,
    ) -> Guessed | None:
        """Run a draft, as `Backend.run_guesses` has it."""
        program = self._last(layers, moved)
        if program is None:
            return None
        return program.run_guesses(moved, more, guessing, self.embedding)

    def _last(self, layers: tuple[StackLayer, ...], moved: MovedBatch) -> TokenProgram | None:
        """The program that ran the batch before these tokens as its last; none before all weights
        are laid out."""
        if not self.late.are_laid:
            return None
        before = moved.before
        kept = self.kept.get((id(layers), True, len(moved.token_ids), len(before.generated)))
        if kept is None or kept.program.last is not before or kept.facts[0] != n_threads():
            return None
        return kept.program

    def __call__(
        self, x: Floats, layers: tuple[StackLayer, ...], given: TokenBatch
    ) -> Floats | None:
        batch, n_tokens = given.batch, len(x)
        if (
            n_tokens > FEW_TOKENS
            or len(batch.logit_rows) != n_tokens
            or not all(batch.generated)
            or any(layer.spec.laurel is not None for layer in layers)
        ):
            return None
        stored = tuple(len(rows.slots) for rows in batch.segments)
        facts = n_threads(), stored, batch.starts, *map(_facts, given.inputs)
        key = id(layers), given.head is not None, n_tokens, len(batch.generated)
        kept = self.kept.get(key)
        if kept is None or kept.facts != facts or not kept.program.is_for(layers, given):
            if len(self.kept) >= MANY_PROGRAMS:
                self.kept.clear()
            self.kept.pop(key, None)
            steps = AttentionSteps(self.attention, self.latents, len(layers))
            program = TokenProgram(self.operations, steps, layers, given, x.shape[1])
            kept = self.kept[key] = _Kept(facts, program)
        self._ran = kept.program
        return kept.program.run(x, given)


def _facts(inputs: TokenInputs) -> tuple[object, ...]:
    """What chains depend on, of a layer's inputs."""
    rope = inputs.rope
    turned = None if rope is None else (rope.cos.shape, rope.interleaved)
    return turned, inputs.q_scale is None
