"""`Sampler`: runs the chain, and owns a generation's state from token to token.

Knows token ids and numbers, no model; of the tokenizer only the texts that DRY's sequence breakers
are looked for in.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from localkv.errors import LocalKVError, UsageError
from localkv.sampling.candidates import (
    Floats,
    Ints,
    all_ids,
    drawn,
    softmax,
    starting,
    starting_with,
)
from localkv.sampling.params import SamplingParams, active_samplers
from localkv.sampling.samplers import logit_bias
from localkv.sampling.state import NONE, Breakers, SamplerState, Snapshot


class Sampler:
    """Draws the tokens of one generation.

    The same parameters, seed, accepted tokens and logits give the same tokens. A greedy sampler
    draws no random numbers, except for XTC if that is on.

    Args:
        params: the chain and its settings.
        n_vocab: length of the logits.
        n_ctx: tokens of context, which a `last_n` of -1 stands for.
        token_text: text of a token; without it DRY has no sequence breakers.
        tokenize: text to token ids, no special tokens added; cuts sequence breakers that span
            tokens, see `Breakers`.

    Attributes:
        params: as given.
        seed: the seed in use, drawn where the parameters leave it open.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        n_vocab: int,
        n_ctx: int = 4096,
        token_text: Callable[[int], str] | None = None,
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        for token in params.logit_bias:
            if token >= n_vocab:
                raise UsageError(f"logit_bias names token {token}; the vocabulary has {n_vocab}")
        if sum(bias == -math.inf for bias in params.logit_bias.values()) >= n_vocab:
            raise UsageError("logit_bias bans every token", "leave one that can be drawn")
        seed = params.seed
        self.params = params
        self.seed = secrets.randbits(32) if seed is None or seed == -1 else int(seed)
        self._ids = all_ids(n_vocab)
        bias = params.logit_bias
        self._bias = np.array([*bias], np.int64), np.array([*bias.values()], np.float64)
        active = active_samplers(params)
        self._chain = [entry.function for entry in active]
        begins_with_k = bool(active) and active[0].name == "top_k" and not params.logit_bias
        self._n_first = params.top_k if begins_with_k else 0
        self._takes_largest = (
            any(entry.name == "temperature" for entry in active)
            and params.temperature <= 0
            and params.dynatemp_range <= 0
            and not params.logit_bias
            and all(entry.keeps_largest for entry in active)
        )
        self._state = SamplerState(
            self.seed,
            n_ctx=n_ctx,
            windows=[entry.last_n(params) for entry in active],
            tails_of=(lambda token: NONE)
            if token_text is None
            else Breakers(params.dry_sequence_breakers, token_text, tokenize),
        )

    def reset(self) -> None:
        """Forgets the accepted tokens and restarts the random generator with the same seed."""
        self._state.reset()

    def accept(self, token: int) -> None:
        """Tells the sampler the text's next token: the prompt's tokens first, then drawn ones."""
        self._state.accept(token)

    def snapshot(self) -> Snapshot:
        """The state as it is now: what was accepted, and the random generator."""
        return self._state.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Takes back what was accepted and drawn since a snapshot of this sampler.

        Raises:
            ValueError: more tokens than `MOST_UNDONE` were accepted since.
        """
        self._state.restore(snapshot)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token; the caller hands it to `accept` if it becomes part of the text.

        Args:
            logits: float32 [n_vocab], left as they are.

        Raises:
            LocalKVError: logits are NaN, or all of them -inf.
        """
        if self._takes_largest:
            return self._check(logits)
        return self.sample_among(logits)[0]

    def sample_among(self, logits: npt.NDArray[np.float32]) -> tuple[int, Ints, Floats]:
        """The token that `sample` draws, and among which, some of them perhaps never.

        Args:
            logits: float32 [n_vocab], left as they are.

        Returns:
            The token; ids, int64 [n]; their probabilities, float64 [n]. The arrays are valid until
            this thread draws again.

        Raises:
            LocalKVError: logits are NaN, or all of them -inf.
        """
        ids, probabilities = self._distribution(logits)
        if len(ids) == 1 or np.count_nonzero(probabilities) == 1:
            at = int(probabilities.argmax())
        else:
            at = drawn(probabilities, self._state.random.random())
        token = int(ids[at])
        self._state.drew(token, at, probabilities)
        return token, ids, probabilities

    def candidates(self, logits: npt.NDArray[np.float32]) -> tuple[Ints, Floats]:
        """The tokens that `sample` draws from and their probabilities.

        XTC draws whether it runs, here as in `sample`.

        Args:
            logits: float32 [n_vocab], left as they are.

        Returns:
            Token ids, ascending, int64 [n]; their probabilities, all above 0, float64 [n].
        """
        ids, probabilities = self._distribution(logits)
        drawable = np.flatnonzero(probabilities)
        return ids[drawable], probabilities[drawable]

    def _distribution(self, logits: npt.NDArray[np.float32]) -> tuple[Ints, Floats]:
        """What the chain leaves, some of it perhaps with a probability of 0.

        Valid until this thread draws again.
        """
        self._check(logits)
        if self._n_first:
            candidates, chain = starting_with(logits, self._n_first), self._chain[1:]
        else:
            candidates, chain = starting(self._ids, logits), self._chain
        if self.params.logit_bias:
            candidates = logit_bias(candidates, *self._bias)
        with np.errstate(over="ignore"):
            for function in chain:
                candidates = function(candidates, self.params, self._state)
        return candidates.ids, softmax(candidates.logits)

    def _check(self, logits: npt.NDArray[np.float32]) -> int:
        """Refuses logits that cannot be sampled from; returns the token with the largest."""
        if logits.shape != self._ids.shape:
            raise ValueError(f"logits of shape {logits.shape}, not {self._ids.shape}")
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise LocalKVError("the model produced NaN or infinite logits")
        return best
