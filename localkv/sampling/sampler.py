"""`Sampler`: runs the chain, and owns what a generation carries from token to token.

Knows token ids and numbers, no model; of the tokenizer only the texts that DRY's sequence breakers
are looked for in.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from localkv.config import SamplingParams
from localkv.errors import LocalKVError, UsageError
from localkv.sampling.candidates import Candidates, Floats, Ints, softmax
from localkv.sampling.dry import Breakers, dry, dry_breakers
from localkv.sampling.samplers import (
    logit_bias,
    min_p,
    penalties,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typ_p,
    xtc,
)


def _is_on(name: str, params: SamplingParams) -> bool:
    """Whether a sampler of the chain can change anything; those that cannot do not run."""
    p = params
    match name:
        case "penalties":
            neutral = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) == (1, 0, 0)
            return p.repeat_last_n != 0 and not neutral
        case "dry":
            return p.dry_multiplier != 0 and p.dry_penalty_last_n != 0
        case "top_n_sigma":
            return p.top_n_sigma > 0
        case "top_k":
            return p.top_k > 0
        case "typ_p":
            return p.typ_p < 1
        case "top_p":
            return p.top_p < 1
        case "min_p":
            return p.min_p > 0
        case "xtc":
            return p.xtc_probability > 0 and p.xtc_threshold <= 0.5
        case _:
            return p.temperature != 1 or p.dynatemp_range > 0


def active_chain(params: SamplingParams) -> tuple[str, ...]:
    """The samplers that can change anything, in order."""
    return tuple(name for name in params.samplers if _is_on(name, params))


class Sampler:
    """Draws the tokens of one generation.

    The same parameters, seed, accepted tokens and logits give the same tokens. A greedy sampler
    draws no random numbers, but for XTC's where that is on.

    Args:
        params: the chain and its settings.
        n_vocab: length of the logits.
        n_ctx: tokens of context, which a `last_n` of -1 stands for.
        token_text: text of a token; without it DRY has no sequence breakers.
        tokenize: text to token ids, no special tokens added; cuts sequence breakers that span
            tokens, see `dry_breakers`.

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
        seed = params.seed
        self.params = params
        self.seed = secrets.randbits(32) if seed is None or seed == -1 else int(seed)
        self._ids = np.arange(n_vocab)
        self._ids.flags.writeable = False
        self._logits = np.empty(n_vocab)  # of the token being drawn; allocating it anew is slow
        self._token_text = token_text
        self._tokenize = tokenize
        self._chain = active_chain(params)
        # A sampler that cannot drop or move the largest logit does not change what greedy takes.
        self._takes_largest = (
            "temperature" in self._chain
            and params.temperature <= 0
            and params.dynatemp_range <= 0
            and not params.logit_bias
            and not {"penalties", "dry", "typ_p", "xtc"}.intersection(self._chain)
        )
        windows = {"penalties": params.repeat_last_n, "dry": params.dry_penalty_last_n}
        self._windows = {
            name: n_ctx if last_n == -1 else last_n
            for name, last_n in windows.items()
            if name in self._chain
        }
        self.reset()

    def reset(self) -> None:
        """Forgets the accepted tokens and starts the random generator anew, with the same seed."""
        self._accepted = array("i")
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def accept(self, token: int) -> None:
        """Tells the sampler the next token of the text: those of the prompt, then those drawn."""
        if not self._windows:
            return
        self._accepted.append(token)
        needed = max(self._windows.values())
        if len(self._accepted) >= 2 * needed:
            del self._accepted[:-needed]

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token; the caller hands it to `accept` if it becomes part of the text.

        Args:
            logits: float32 [n_vocab], left as they are.

        Raises:
            LocalKVError: logits are NaN, or all of them -inf.
        """
        if self._takes_largest:
            return self._check(logits)
        ids, probabilities = self.candidates(logits)
        if len(ids) == 1:
            return int(ids[0])
        cumulative = np.cumsum(probabilities)
        target = self._random.random() * cumulative[-1]
        return int(ids[np.searchsorted(cumulative, target, "right")])

    def candidates(self, logits: npt.NDArray[np.float32]) -> tuple[Ints, Floats]:
        """The tokens that `sample` draws from and their probabilities.

        XTC draws whether it runs, here as in `sample`.

        Args:
            logits: float32 [n_vocab], left as they are.

        Returns:
            Token ids, ascending, int64 [n]; their probabilities, all above 0, float64 [n].
        """
        self._check(logits)
        self._logits[:] = logits
        candidates = Candidates(self._ids, self._logits)
        if self.params.logit_bias:
            candidates = logit_bias(candidates, self.params.logit_bias)
        with np.errstate(over="ignore"):
            for name in self._chain:
                candidates = self._apply(name, candidates)
        ids, probabilities = candidates.ids, softmax(candidates.logits)
        if probabilities.all():
            return ids, probabilities
        drawable = np.flatnonzero(probabilities)
        return ids[drawable], probabilities[drawable]

    def _check(self, logits: npt.NDArray[np.float32]) -> int:
        """Refuses logits that cannot be sampled from; returns the token with the largest."""
        if logits.shape != self._ids.shape:
            raise ValueError(f"logits of shape {logits.shape}, not {self._ids.shape}")
        best = int(logits.argmax())  # the first NaN, if there is one
        if not np.isfinite(logits[best]):
            raise LocalKVError("the model produced NaN or infinite logits")
        return best

    def _apply(self, name: str, c: Candidates) -> Candidates:
        p = self.params
        match name:
            case "penalties":
                recent = self._recent(self._windows[name])
                factors = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
                return penalties(c, recent, *factors)
            case "dry":
                recent = self._recent(self._windows[name])
                strength = p.dry_multiplier, p.dry_base, p.dry_allowed_length
                return dry(c, recent, self._breakers, *strength)
            case "top_n_sigma":
                return top_n_sigma(c, p.top_n_sigma)
            case "top_k":
                return top_k(c, p.top_k)
            case "typ_p":
                return typ_p(c, p.typ_p, p.min_keep)
            case "top_p":
                return top_p(c, p.top_p, p.min_keep)
            case "min_p":
                return min_p(c, p.min_p, p.min_keep)
            case "xtc":
                runs = len(c.ids) > 1 and self._random.random() <= p.xtc_probability
                return xtc(c, p.xtc_threshold, p.min_keep) if runs else c
            case _:
                return temperature(c, p.temperature, p.dynatemp_range, p.dynatemp_exponent)

    def _recent(self, last_n: int) -> Ints:
        # A copy: an array cannot grow while a view of it is held.
        return np.array(self._accepted[-last_n:], np.int64)

    @cached_property
    def _breakers(self) -> Breakers:
        if self._token_text is None:
            return {}
        texts = [self._token_text(token) for token in range(len(self._ids))]
        return dry_breakers(self.params.dry_sequence_breakers, texts, self._tokenize)
