"""All layers for one generated token, as one chain.

Between chains Python has to fill in addresses, helpers of other threads may fall asleep, and what
it needs has left the caches, as each token reads all weights. So everything that a token's layers
work on has a place that stays, and steps of all layers are one chain. What no chain can run is
called in between (`TokenProgram.stages`). Workers and their order are those of layers that run one
by one, and so are the bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from localkv.kernels.backend import StackLayer, TokenBatch, TokenInputs
from localkv.kernels.cpu.arrays import Floats
from localkv.kernels.cpu.attention.latent_attention import LatentAttention
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.token_steps import AttentionSteps
from localkv.kernels.cpu.layer import CpuLayer
from localkv.kernels.cpu.runtime.chain import Chain
from localkv.kernels.cpu.token_layer import LayerSteps
from localkv.kernels.cpu.token_places import TokenPlaces
from localkv.system.threads import n_threads

MANY_PROGRAMS = 4
"""The most that are remembered."""


class TokenProgram:
    """The layers of a model for one token of one sequence.

    Args:
        operations: of layers, whose steps these are.
        attention: steps of attention.
        layers: of the model.
        given: a token's, whose caches these are; of its inputs only sizes matter.
    """

    def __init__(
        self,
        operations: CpuLayer,
        attention: AttentionSteps,
        layers: tuple[StackLayer, ...],
        given: TokenBatch,
        n_embd: int,
    ) -> None:
        self.attention = attention
        self.layers, self.caches = layers, given.caches
        self.places = TokenPlaces(operations.chains.scratch, given, n_embd)
        x = self.places.rows[0]
        for index, layer in enumerate(layers):
            x = LayerSteps(operations, attention, self.places, index, layer).add(x)
        self.out = x

    def run(self, x: Floats, given: TokenBatch) -> Floats | None:
        """x [1, n_embd] behind all layers; None if the token's attention is cut otherwise.

        Raises:
            BoundsError: the token is not of the caches that this was made for.
        """
        if not self.attention.prepare(given.batch):
            return None
        self.places.fill(x, given)
        for stage in self.places.stages:
            if isinstance(stage, Chain):
                stage.run()
            else:
                stage(given)
        return self.out.copy()


@dataclass(frozen=True)
class _Kept:
    """A program, and the numbers that it was made for, besides the objects that it keeps."""

    facts: tuple[object, ...]
    program: TokenProgram


class TokenPrograms:
    """As `Backend.run_layers` has it: programs of a backend's models.

    Args:
        operations: of layers.
        attention, latents: over packed K and V, and over packed latents.
    """

    def __init__(
        self, operations: CpuLayer, attention: PackedAttention, latents: LatentAttention
    ) -> None:
        self.operations = operations
        self.attention, self.latents = attention, latents
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
        stored = tuple(len(rows.slots) for rows in batch.segments)
        facts = n_threads(), stored, *map(_facts, given.inputs)
        kept = self.kept.get(id(layers))
        if (
            kept is None
            or kept.facts != facts
            or kept.program.layers is not layers
            or kept.program.caches is not given.caches
        ):
            if len(self.kept) >= MANY_PROGRAMS:
                self.kept.clear()
            self.kept.pop(id(layers), None)
            steps = AttentionSteps(self.attention, self.latents, len(layers))
            program = TokenProgram(self.operations, steps, layers, given, x.shape[1])
            kept = self.kept[id(layers)] = _Kept(facts, program)
        return kept.program.run(x, given)


def _facts(inputs: TokenInputs) -> tuple[object, ...]:
    """What chains depend on, of a layer's inputs."""
    rope = inputs.rope
    turned = None if rope is None else (rope.cos.shape, rope.interleaved)
    return turned, inputs.q_scale is None
