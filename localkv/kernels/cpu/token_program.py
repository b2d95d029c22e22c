"""All layers for one generated token, or for a few, and their logits, as one chain.

Between chains Python has to fill in addresses, helpers of other threads may fall asleep, and what
it needs has left the caches, as each token reads all weights. So everything that a token's layers
work on has a place that stays, and steps of all layers are one chain. What no chain can run is
called in between (`TokenProgram.stages`). Workers and their order are those of layers that run one
by one, and so are the bits. Tokens are of one text, as guesses are, or of several.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localkv.cache.arrays import Batch
from localkv.kernels.backend import (
    Head,
    MovedBatch,
    StackLayer,
    TokenBatch,
    TokenInputs,
    capped_logits,
)
from localkv.kernels.cpu.addresses import Floats
from localkv.kernels.cpu.attention.latent_attention import LatentAttention
from localkv.kernels.cpu.attention.packed_attention import PackedAttention
from localkv.kernels.cpu.attention.token_steps import AttentionSteps
from localkv.kernels.cpu.layer import CpuLayer
from localkv.kernels.cpu.layer_chains import FEW_TOKENS, runs
from localkv.kernels.cpu.linear.embedding import Embedding
from localkv.kernels.cpu.linear.late_panels import LatePanels
from localkv.kernels.cpu.linear.products import add_products, with_bias
from localkv.kernels.cpu.runtime.chain import Chain
from localkv.kernels.cpu.token_guesses import TokenGuesses
from localkv.kernels.cpu.token_layer import LayerSteps
from localkv.kernels.cpu.token_places import TokenPlaces
from localkv.kernels.guessing import Guessed, Guessing
from localkv.system.threads import n_threads

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
        """x [tokens, n_embd] behind all layers, or the logits; None if attention is cut otherwise.

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
        """Fill the places with tokens that follow those of `last`, whose rows go to the same
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
    """A program, and the numbers that it was made for, besides the objects that it keeps."""

    facts: tuple[object, ...]
    program: TokenProgram


class TokenPrograms:
    """As `Backend.run_layers` has it: programs of a backend's models.

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

    def forget(self) -> None:
        """Make all programs anew."""
        self.kept.clear()

    def run_next(self, layers: tuple[StackLayer, ...], moved: MovedBatch) -> Floats | None:
        """Run tokens like those of the batch before, as `Backend.run_next` has it."""
        program = self._last(layers, moved)
        if program is None or program.head is None or not program.move(moved, self.embedding):
            return None
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
        return kept.program.run(x, given)


def _facts(inputs: TokenInputs) -> tuple[object, ...]:
    """What chains depend on, of a layer's inputs."""
    rope = inputs.rope
    turned = None if rope is None else (rope.cos.shape, rope.interleaved)
    return turned, inputs.q_scale is None
