"""The sampler chain: from logits to the next token, with llama.cpp's names, order and meaning.

Each sampler is a plain function from `Candidates` to `Candidates`; `Sampler` owns what a generation
carries from token to token (the recent tokens, the random generator) and runs the chain. What each
one computes is what `src/llama-sampler.cpp` computes; where llama.cpp leaves the choice between
equal logits to its sort, the lowest token id wins here. Knows token ids and numbers, no model; of
the tokenizer only the texts that DRY's sequence breakers are looked for in.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from localkv.config import SAMPLER_ORDER, SamplingParams
from localkv.errors import LocalKVError, UsageError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Breakers = Mapping[int, set[tuple[int, ...]]]
"""DRY's sequence breakers: a token that one begins with -> the tokens that then complete it, none
where the token holds the whole breaker."""

_ALIASES = {
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "top-n-sigma": "top_n_sigma",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "min-p": "min_p",
    "temp": "temperature",
}

_LETTERS = dict(zip("edskypmxt", SAMPLER_ORDER, strict=True))


class Candidates(NamedTuple):
    """The tokens that can still be drawn.

    Attributes:
        ids: ascending token ids, int64 [n], n >= 1.
        logits: theirs, float64 [n]; -inf for one that cannot be drawn but that llama.cpp counts.
    """

    ids: Ints
    logits: Floats


def parse_samplers(text: str) -> tuple[str, ...]:
    """A chain written as `--samplers` takes it: names with `;` between them.

    >>> parse_samplers("top-k;temp")
    ('top_k', 'temperature')
    """
    names = [name.strip() for name in text.split(";")]
    chain = tuple(_ALIASES.get(name, name) for name in names if name)
    for name in chain:
        if name not in SAMPLER_ORDER:
            raise UsageError(f"unknown sampler {name!r}", f"samplers: {', '.join(SAMPLER_ORDER)}")
    return chain


def parse_sampler_sequence(text: str) -> tuple[str, ...]:
    """A chain written as `--sampling-seq` takes it: one letter for each sampler.

    >>> parse_sampler_sequence("kt")
    ('top_k', 'temperature')
    """
    for letter in text:
        if letter not in _LETTERS:
            known = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
            raise UsageError(f"unknown sampler {letter!r} in {text!r}", f"samplers: {known}")
    return tuple(_LETTERS[letter] for letter in text)


def softmax(logits: Floats) -> Floats:
    """Probabilities of the candidates, float64 [n]."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise LocalKVError(
            "no token is left to draw", hint="logit_bias or a penalty excludes every one"
        )
    probabilities: Floats = np.exp(logits - largest)
    probabilities /= probabilities.sum()
    return probabilities


def _entropy(probabilities: Floats) -> float:
    p = probabilities[probabilities > 0]
    return float(-(p * np.log(p)).sum())


def _largest(keys: Floats, k: int) -> Ints:
    """Indices, ascending, of the k largest keys [n]; of equal keys those with the lowest index."""
    n = len(keys)
    if k >= n:
        return np.arange(n)
    columns = n // 64
    kth = -np.inf
    if k <= columns // 4:
        # The maxima of k columns are at least this large, so the k-th largest key is, too.
        maxima = keys[: 64 * columns].reshape(64, columns).max(axis=0)
        kth = np.partition(maxima, columns - k)[columns - k]
    above = np.flatnonzero(keys > kth)
    if len(above) < k:
        equal = np.flatnonzero(keys == kth)
    else:
        values = keys[above]
        kth = np.partition(values, len(values) - k)[len(values) - k]
        above, equal = above[values > kth], above[values == kth]
    return np.sort(np.concatenate([above, equal[: k - len(above)]]))


def _fewest(
    keys: Floats,
    probabilities: Floats,
    mass: float,
    side: Literal["left", "right"],
    min_keep: int,
) -> Ints:
    """Indices, ascending, of the fewest candidates with the largest keys that hold `mass`.

    The one that reaches it (side "left") or exceeds it (side "right") is among them.
    """
    for k in (256, 4096, len(keys)):  # mostly few tokens hold the mass: sort no more of them
        best = _largest(keys, k)
        best = best[np.argsort(-keys[best], kind="stable")]
        cumulative = np.cumsum(probabilities[best])
        count = max(int(np.searchsorted(cumulative, mass, side)) + 1, min_keep)
        if count <= len(best):
            break
    return np.sort(best[:count])


def _find(ids: Ints, tokens: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Indices into `ids` of those `tokens` that are in it, and which ones are."""
    at = np.searchsorted(ids, tokens)
    at[at == len(ids)] = 0
    found = ids[at] == tokens
    return at[found], found


def logit_bias(candidates: Candidates, bias: Mapping[int, float]) -> Candidates:
    """Adds a number to the logits of some tokens; -inf bans one."""
    at, found = _find(candidates.ids, np.array(list(bias), np.int64))
    logits = candidates.logits.copy()
    logits[at] += np.array(list(bias.values()), np.float64)[found]
    return Candidates(candidates.ids, logits)


def penalties(
    candidates: Candidates, recent: Ints, repeat: float, frequency: float, presence: float
) -> Candidates:
    """Lowers the logits of tokens that came up recently.

    Keskar et al. 2019 (CTRL) divide a logit by `repeat`; llama.cpp multiplies one that is not
    positive, so that it does fall. Then `count * frequency + presence` is taken off, as OpenAI's
    interface defines them.

    Args:
        recent: the last tokens, int64 [any].
    """
    tokens, counts = np.unique(recent, return_counts=True)
    at, found = _find(candidates.ids, tokens)
    logits = candidates.logits.copy()
    x = logits[at]
    x = np.where(x > 0, x / repeat, x * repeat)
    logits[at] = x - (counts[found] * frequency + presence)
    return Candidates(candidates.ids, logits)


def dry_breakers(
    breakers: Sequence[str],
    texts: Sequence[str],
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> Breakers:
    """The token sequences in which a sequence breaker can turn up.

    Either one token holds the breaker, or a token ends with its beginning and the rest follows, as
    the tokenizer cuts it. As in llama.cpp a breaker is cut to 40 bytes and the rest to 20 tokens.

    Args:
        breakers: texts.
        texts: of all tokens, by id.
        tokenize: cuts the rest of a breaker; None takes the longest token that fits, each time.
    """
    tokenize = tokenize or _longest_match(texts)
    found: dict[int, set[tuple[int, ...]]] = {}
    for text in breakers:
        breaker = text.encode()[:40].decode(errors="ignore")
        if not breaker:
            continue
        cuts = {breaker[:i]: tokenize(breaker[i:]) for i in range(1, len(breaker))}
        tails = {beginning: tuple(rest)[:20] for beginning, rest in cuts.items() if rest}
        for token, word in enumerate(texts):
            if breaker in word:
                found.setdefault(token, set()).add(())
            elif word.endswith(tuple(tails)):
                ends = {tail for beginning, tail in tails.items() if word.endswith(beginning)}
                found.setdefault(token, set()).update(ends)
    return found


def _longest_match(texts: Sequence[str]) -> Callable[[str], list[int]]:
    ids = {word: token for token, word in reversed(list(enumerate(texts))) if word}

    def tokenize(text: str) -> list[int]:
        tokens = []
        while text:
            fits = [n for n in range(len(text), 0, -1) if text[:n] in ids]
            if not fits:
                return []
            tokens.append(ids[text[: fits[0]]])
            text = text[fits[0] :]
        return tokens

    return tokenize


def _tokens_since_breaker(recent: Ints, breakers: Breakers) -> int:
    """How many of the last tokens come after the last sequence breaker; all, if there is none."""
    n = len(recent)
    if not breakers:
        return n
    for since in range(n):
        tails = breakers.get(int(recent[n - 1 - since]))
        if tails is None:
            continue
        after = recent[n - since :]
        fits = [len(tail) for tail in tails if tuple(after[: len(tail)]) == tail]
        if fits:
            return since - max(fits)
    return n


def dry(
    candidates: Candidates,
    recent: Ints,
    breakers: Breakers,
    multiplier: float,
    base: float,
    allowed_length: int,
) -> Candidates:
    """Lowers the logits of tokens that would go on with a sequence that was there before.

    "Don't repeat yourself" (p-e-w, text-generation-webui #5677). A token is worth
    `multiplier * base ** (length - allowed_length)` off, `length` being the longest run of last
    tokens (not across a sequence breaker) that the token followed earlier; nothing where it is
    shorter than `allowed_length`, or where the token holds a breaker. llama.cpp bounds the exponent
    so that the power stays finite in float32.

    Args:
        recent: the last tokens, int64 [n].
    """
    n = len(recent)
    limit = _tokens_since_breaker(recent, breakers)
    if n <= allowed_length or limit < allowed_length:
        return candidates
    max_exponent = int(88.7228391 / math.log(base)) if base > 1.000001 else n
    limit = min(limit, allowed_length + max_exponent)

    # lengths[i]: how many tokens, up to and with recent[i], equal the last ones.
    lengths = np.zeros(n - 1, np.int64)
    ends = np.arange(n - 1)
    for length in range(1, limit + 1):
        ends = ends[ends >= length - 1]
        ends = ends[recent[ends - (length - 1)] == recent[n - length]]
        if not len(ends):
            break
        lengths[ends] = length

    repeats = lengths >= allowed_length
    tokens, inverse = np.unique(recent[1:][repeats], return_inverse=True)
    longest = np.zeros(len(tokens), np.int64)
    np.maximum.at(longest, inverse, lengths[repeats])
    breaks = np.array([() in breakers.get(token, ()) for token in tokens.tolist()], np.bool_)
    penalty = np.where(breaks, 0.0, multiplier * np.power(base, longest - allowed_length))
    at, found = _find(candidates.ids, tokens)
    logits = candidates.logits.copy()
    logits[at] -= penalty[found]
    return Candidates(candidates.ids, logits)


def top_n_sigma(candidates: Candidates, n: float) -> Candidates:
    """Keeps logits within n standard deviations of the largest (Tang et al. 2024, top-nσ).

    The others become -inf, but stay: they count in the size by which `temperature` normalises.
    """
    logits = candidates.logits
    finite = logits[logits > -np.inf]
    if not len(finite):
        return candidates
    keep = logits >= finite.max() - n * finite.std()
    return Candidates(candidates.ids, np.where(keep, logits, -np.inf))


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keeps the k most likely (Fan et al. 2018)."""
    kept = _largest(candidates.logits, k)
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def typ_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the fewest tokens that hold more than p, those with the most typical probability first.

    Locally typical sampling (Meister et al. 2022): `-log(probability)` closest to the entropy.
    """
    probabilities = softmax(candidates.logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    keys = -np.abs(surprise - _entropy(probabilities))
    kept = _fewest(keys, probabilities, p, "right", min_keep)
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def top_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps the fewest tokens that hold at least p, the most likely first.

    Nucleus sampling (Holtzman et al. 2019).
    """
    probabilities = softmax(candidates.logits)
    kept = _fewest(candidates.logits, probabilities, p, "left", min_keep)
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def min_p(candidates: Candidates, p: float, min_keep: int) -> Candidates:
    """Keeps tokens with at least p times the largest probability (Nguyen et al. 2024)."""
    logits = candidates.logits
    kept = np.flatnonzero(logits >= logits.max() + math.log(p))
    if len(kept) < min_keep:
        kept = _largest(logits, min_keep)
    return Candidates(candidates.ids[kept], logits[kept])


def xtc(candidates: Candidates, threshold: float, min_keep: int) -> Candidates:
    """Drops all tokens with at least the threshold's probability but the least likely of them.

    "Exclude top choices" (p-e-w, text-generation-webui #6335). Whether it runs on a token is drawn
    by the caller. Does nothing where fewer than `min_keep` would be left.
    """
    probabilities = softmax(candidates.logits)
    top = np.flatnonzero((probabilities >= threshold) & (probabilities > 0))
    if len(top) < 2 or len(probabilities) - (len(top) - 1) < min_keep:
        return candidates
    least = top[candidates.logits[top] == candidates.logits[top].min()][-1]
    kept = np.ones(len(probabilities), np.bool_)
    kept[top] = top == least
    return Candidates(candidates.ids[kept], candidates.logits[kept])


def temperature(
    candidates: Candidates, temp: float, dynatemp_range: float, dynatemp_exponent: float
) -> Candidates:
    """Divides the logits by the temperature; one that is not positive leaves the largest only.

    With a range the temperature is, after kalomaze's dynamic temperature,
    `low + (high - low) * (entropy / log(n)) ** exponent`, with `low = max(0, temp - range)` and
    `high = temp + range`.
    """
    if dynatemp_range > 0 and len(candidates.ids) > 1:
        spread = _entropy(softmax(candidates.logits)) / math.log(len(candidates.ids))
        low, high = max(0.0, temp - dynatemp_range), temp + dynatemp_range
        temp = low + (high - low) * spread**dynatemp_exponent
    if temp > 0:
        return Candidates(candidates.ids, candidates.logits / temp)
    best = candidates.logits.argmax(0, keepdims=True)
    return Candidates(candidates.ids[best], candidates.logits[best])


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
        self._chain = tuple(name for name in params.samplers if _is_on(name, params))
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
            raise LocalKVError("the model produced logits that are not numbers")
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
