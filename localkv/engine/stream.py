"""From token ids to text: pieces as they come, stop strings, figures, and signs of degeneration.

A text has degenerated if it is a loop, or a long run without any doubt. The thresholds are from 160
texts of the model that ships, of up to 700 tokens, with five pairs of cache types
(docs/quality.md, "Loops").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from threading import RLock
from typing import TYPE_CHECKING, Protocol

import numpy as np

from localkv.config import MIXED, CacheConfig
from localkv.engine.generation import FinishReason, Generation, GenerationStats
from localkv.engine.logprobs import TokenLogprob, named
from localkv.quant_formats import FORMATS

if TYPE_CHECKING:
    from localkv.engine.answer_calls import ReadCalls
    from localkv.engine.audit import Audit
    from localkv.tool_calls.source import ToolCall


class TokenDecoder(Protocol):
    """Turns ids into text that never ends within a character."""

    def push(self, token_id: int) -> str: ...

    def flush(self, *, is_cut: bool = False) -> str:
        """What is left at the end; `is_cut` if the model would have gone on."""
        ...


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: the text, without the stop string that ended it.
        finish_reason: "stop", "length" or "cancelled".
        usage: token counts.
        timings: seconds and rates.
        seed: the seed of the sampler that drew it.
        context_full: it ended with "length" because the context was full.
        logprobs: the logprobs of each token that `usage` counts, including the tokens of a stop
            string that ended the text; None unless they were asked for.
        tool_calls: the calls in the answer, if it was told of tools.
        content: the answer without its calls and its reasoning; None if it was told of none.
        audit: what the packed cache changed, if that was asked for and there are tokens.
    """

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    seed: int
    context_full: bool = False
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    audit: Audit | None = None

    def __repr__(self) -> str:
        facts = [f"text={self.text!r}", f"finish_reason={self.finish_reason!r}"]
        if self.tool_calls:
            facts.append(f"tool_calls={self.tool_calls!r}")
        usage, timings = self.usage, self.timings
        facts.append(
            f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, "
            f"{timings.decode_per_second:.1f} t/s"
        )
        return f"Completion({', '.join(facts)})"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Usage:
    """Token counts, with OpenAI's names.

    `cached_tokens` of the prompt were not evaluated again. The next `lost_tokens` were the same as
    before, too, but layers with a window no longer had the rows that they see (`swa_full`), or
    recurrent layers no state from there. Of the completion, `accepted_tokens` were guessed
    rightly, of `drafted_tokens` guesses that were evaluated in `verified_batches`, and
    `reasoning_tokens` are reasoning, without its tags.
    `requantised_pages` of a cache with a budget changed to smaller types meanwhile.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int
    lost_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verified_batches: int = 0
    requantised_pages: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds, and tokens per second, of the prompt and of decoding; `requantise_seconds` of both
    went into pages that changed their types."""

    prompt_seconds: float
    prompt_per_second: float
    decode_seconds: float
    decode_per_second: float
    requantise_seconds: float = 0.0


class StopStrings:
    """Ends a text where one of several strings begins, holding back text that may become one.

    Attributes:
        hit: the string that ended it, if one did.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """Text that is certain; after a hit, the text before the stop string."""
        text = self.held + piece
        starts = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if starts:
            at, self.hit = min(starts, key=lambda found: found[0])
            self.held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, now that no more comes."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


@dataclass(frozen=True)
class LineLimits:
    """What ends a text at the beginning of a line, as editors want it of what fills a gap.

    Attributes:
        n_indent: spaces and tabs that each further line begins with at least.
        seconds: from the first token on, after which the next line break is the end; 0 for none.
    """

    n_indent: int = 0
    seconds: float = 0.0


NO_LIMITS = LineLimits()


class LineEnd:
    """Ends a text by `LineLimits`.

    Attributes:
        is_reached: it has ended.
    """

    def __init__(self, limits: LineLimits) -> None:
        self._limits = limits
        self._started: float | None = None
        self._indent: int | None = None  # of the line that begins, once there is a further one
        self.is_reached = False

    def push(self, piece: str) -> str:
        """The text that remains of a piece."""
        limits = self._limits
        if not limits.n_indent and not limits.seconds:
            return piece
        now = time.monotonic()
        self._started = now if self._started is None else self._started
        is_late = 0 < limits.seconds < now - self._started
        for at, character in enumerate(piece):
            if self._indent is not None and character in " \t":
                self._indent += 1
            elif self._indent is not None and self._indent < limits.n_indent:
                self.is_reached = True
                return piece[:at]
            else:
                self._indent = None
            if character == "\n":
                self._indent = 0
                if is_late:
                    self.is_reached = True
                    return piece[: at + 1]
        return piece


class TextStream(Iterator[str]):
    """Pieces of text as they are generated; `completion` once they are exhausted.

    Between two pieces it holds nothing: other calls, and other streams of the same model, may come
    in between, and the text is the same as without them. Threads may share it; each
    piece goes to one of them. An exception, such as Ctrl-C, while a piece is made ends it, with
    "cancelled". Closing it, or leaving it, keeps the evaluated rows in the cache; one that is not
    referred to any more has ended with the next step of others.

    Args:
        generation: yields the tokens.
        decoder: turns them into text.
        stops: strings that end the text.
        seed: of the sampler.
        opening: text at the end of the prompt, which comes first.
        n_reasoned: how many tokens so far are reasoning.
        lines: what ends it at the beginning of a line, with "length".
        token_bytes: the bytes of a token, if its logprobs are asked for.

    Attributes:
        calls: looks for calls of tools in the finished text, if there are tools.
        audited: audits the finished text for `completion`, if that is asked for.
    """

    def __init__(
        self,
        generation: Generation,
        decoder: TokenDecoder,
        stops: Sequence[str],
        seed: int,
        *,
        opening: str = "",
        n_reasoned: Callable[[], int] = lambda: 0,
        lines: LineLimits = NO_LIMITS,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        self.generation = generation
        self.seed = seed
        self._opening = opening
        self._n_opening = len(opening)
        self._decoder = decoder
        self._stops = StopStrings(stops)
        self._lines = LineEnd(lines)
        self._text: list[str] = []
        self._sizes: list[int] = []  # characters that each token added, before stop strings
        self._finish_reason: FinishReason | None = None
        self.calls: ReadCalls | None = None
        self.audited: Callable[[], Audit | None] | None = None
        self._audit: Audit | None = None
        self._n_reasoned = n_reasoned
        self._token_bytes = token_bytes
        self._logprobs: list[TokenLogprob] = []
        self._one_at_a_time = RLock()

    def __repr__(self) -> str:
        state = self._finish_reason or "goes on"
        return f"<TextStream: {self.generation.stats.n_generated} tokens, {state}>"

    def __next__(self) -> str:
        with self._one_at_a_time:
            piece, self._opening = self._opening, ""
            if piece:
                self._text.append(piece)
            try:
                while not piece and self._finish_reason is None:
                    piece = self._next_piece()
                    self._text.append(piece)
            except BaseException:
                self.close()
                raise
            if not piece:
                raise StopIteration
            return piece

    def advance(self) -> bool:
        """Run one step if the next token is not there, such as for a piece of a long prompt;
        `n_read` says how far it is.

        Returns:
            whether it is there now, or none will be.
        """
        with self._one_at_a_time:
            return self.generation.advance()

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that are evaluated."""
        request = self.generation.request
        return min(request.n_prompt, request.n_held)

    def read(self, is_ready: Callable[[], bool]) -> str | None:
        """The text of the tokens that are there; None once all of it was read.

        Args:
            is_ready: whether the next token is there, or none follows, so that nothing is run.
        """
        with self._one_at_a_time:
            if self._finish_reason is not None:
                return None
            pieces, self._opening = [self._opening], ""
            try:
                while self._finish_reason is None and is_ready():
                    pieces.append(self._next_piece())
            except BaseException:
                self.close()
                raise
            text = "".join(pieces)
            self._text.append(text)
            return text

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._stops.hit

    @property
    def stats(self) -> GenerationStats:
        """Counts and seconds so far."""
        return self.generation.stats

    @property
    def token_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """The logprobs of the tokens so far, with or without text of their own; None if not asked
        for."""
        if self._token_bytes is None:
            return None
        with self._one_at_a_time:
            for one in self.generation.logprobs[len(self._logprobs) :]:
                self._logprobs.append(named(one, self._token_bytes))
            return tuple(self._logprobs)

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The logprobs of tokens since the last call. They are dropped here, so a text takes no
        memory for them if `token_logprobs` is not read."""
        if self._token_bytes is None:
            return ()
        with self._one_at_a_time:
            taken = self.generation.take_logprobs()
            return tuple(named(one, self._token_bytes) for one in taken)

    def degeneration(self) -> Degeneration:
        """Signs of a degenerated text in the tokens so far; entropies are looked at if they were
        kept for an audit."""
        stats, kept = self.stats, self.generation.predictions
        entropies = [] if kept is None else kept.entropies[: stats.n_generated]
        return degeneration(self.generation.ids[stats.n_prompt :], entropies)

    def places(self) -> list[tuple[int, int]]:
        """For each token so far, the start and the end of the text's characters that it became.

        A token that is only a part of a character has the range of the token that completes it. A
        token that is not part of the text, such as a stop string's, has an empty range.
        """
        with self._one_at_a_time:
            n_tokens, n_read = self.stats.n_generated, len(self._sizes)
            sizes = [*self._sizes, *[0] * (n_tokens - n_read)]
            n_text = sum(map(len, self._text))
        ends = [min(end, n_text) for end in accumulate(sizes, initial=self._n_opening)]
        places, end = list[tuple[int, int]](), ends[-1]
        for start, after in reversed(list(pairwise(ends))):
            end = after if after > start else end
            places.append((start, end))
        return places[::-1]

    def close(self) -> None:
        """End it, with "cancelled" unless it has ended."""
        with self._one_at_a_time:
            self.generation.close()
            if self._finish_reason is None:
                self._finish_reason = "cancelled"

    def _next_piece(self) -> str:
        """The text that the next token adds, which may be none yet."""
        token = next(self.generation, None)
        if token is None:
            piece = self._decoder.flush(is_cut=self.generation.finish_reason != "stop")
        else:
            piece = self._decoder.push(token)
            self._sizes.append(len(piece))
        piece = self._stops.push(piece)
        if self._stops.hit is not None:
            self._finish_reason = "stop"
            self.generation.close()
        elif token is None:
            piece += self._stops.flush()
            self._finish_reason = self.generation.finish_reason
        piece = self._lines.push(piece)
        if self._lines.is_reached and self._finish_reason is None:
            self._finish_reason = "length"
            self.generation.close()
        return piece

    @property
    def completion(self) -> Completion:
        """Everything about the generation; reads the rest of it first."""
        for _ in self:
            pass
        assert self._finish_reason is not None
        stats, text = self.stats, "".join(self._text)
        if self.audited is not None:
            self._audit, self.audited = self.audited(), None
        content: str | None = None
        tool_calls: tuple[ToolCall, ...] = ()
        if self.calls is not None:
            is_cut = self._finish_reason != "stop" or self._stops.hit is not None
            content, tool_calls = self.calls.of(text, is_cut=is_cut)
        return Completion(
            text=text,
            finish_reason=self._finish_reason,
            usage=Usage(
                prompt_tokens=stats.n_prompt,
                completion_tokens=stats.n_generated,
                total_tokens=stats.n_prompt + stats.n_generated,
                cached_tokens=stats.n_reused,
                lost_tokens=stats.n_lost,
                drafted_tokens=stats.n_drafted,
                accepted_tokens=stats.n_accepted,
                verified_batches=stats.n_verified,
                requantised_pages=stats.requantised.n_pages,
                reasoning_tokens=min(self._n_reasoned(), stats.n_generated),
            ),
            timings=Timings(
                prompt_seconds=stats.prompt_seconds,
                prompt_per_second=stats.prompt_per_second,
                decode_seconds=stats.decode_seconds,
                decode_per_second=stats.decode_per_second,
                requantise_seconds=stats.requantised.seconds,
            ),
            seed=self.seed,
            context_full=self._finish_reason == "length" and self.generation.context_full,
            logprobs=self.token_logprobs,
            tool_calls=tool_calls,
            content=content,
            audit=self._audit,
        )


LONGEST_PERIOD = 128
"""Tokens of the longest piece that is looked for."""
LEAST_REPEATS = 8
"""Times that a piece comes one after the other in a loop: of texts that came to their own end none
had a piece more than 3 times."""
LEAST_TOKENS = 32
"""Tokens of a loop at least: a row of digits or dashes is none."""
RUN_TOKENS = 256
"""Tokens of a run without doubt: whole stories of the model that ships have shorter ones."""
LEAST_ENTROPY = 0.01
"""Mean entropy of its predictions, in nats, below which a run is one."""
ROOMY_BITS = 16
"""Bits of a value of K from which on a larger type changes nothing."""


@dataclass(frozen=True)
class Loop:
    """A piece that comes again and again.

    Attributes:
        at: the number of its first token in the answer, counted from 1.
        period: tokens of the piece.
        n_tokens: of all of it; the last piece may be cut.
    """

    at: int
    period: int
    n_tokens: int

    @property
    def n_repeats(self) -> int:
        """Times that the whole piece came."""
        return self.n_tokens // self.period


@dataclass(frozen=True)
class Degeneration:
    """What is wrong with an answer.

    Attributes:
        loop: the longest, or None.
        certain_from: the number of the first token of a run of `RUN_TOKENS` tokens that were
            predicted without doubt; None for no such run, or if entropies are not known.
    """

    loop: Loop | None
    certain_from: int | None

    def line(self, cache: CacheConfig, rungs: Sequence[int] = ()) -> str:
        """What is wrong and what would help, in one line; empty if nothing is.

        Args:
            cache: the one that it was generated with.
            rungs: pages on each rung of its ladder, if it has one.
        """
        if self.loop is not None:
            tokens = "token" if self.loop.period == 1 else "tokens"
            said = (
                f"the same {self.loop.period} {tokens} {self.loop.n_repeats} times "
                f"from token {self.loop.at} on"
            )
        elif self.certain_from is not None:
            said = f"{RUN_TOKENS} tokens without any doubt from token {self.certain_from} on"
        else:
            return ""
        return f"{said}; {_remedy(cache, any(rungs[1:]))}"


def _remedy(cache: CacheConfig, has_changed: bool) -> str:
    """What to try: first a larger type of K, whose error moves attention's weights.

    Args:
        has_changed: pages are not in a ladder's first types any more.
    """
    if has_changed:
        return "try a larger --kv-budget first, then --dry-multiplier 0.8"
    type_k = cache.kv_ladder[0][0] if cache.kv_ladder else cache.shown_types[0]
    bits = 0.0 if type_k == MIXED else FORMATS[type_k].bits_per_value(256)
    if bits >= ROOMY_BITS:
        return "K is not packed: try --dry-multiplier 0.8, or a higher --temp"
    if cache.kv_ladder:
        return "try a --kv-ladder that begins with f16 first, then --dry-multiplier 0.8"
    larger = "q8_0" if bits < FORMATS["q8_0"].bits_per_value(256) else "f16"
    return f"try a larger type of K first (-ctk {larger}), then --dry-multiplier 0.8"


def degeneration(ids: Sequence[int], entropies: Sequence[float] = ()) -> Degeneration:
    """Look for signs in the tokens of an answer, and in the entropies of its predictions."""
    return Degeneration(find_loop(ids), find_certain_run(entropies))


def find_loop(ids: Sequence[int]) -> Loop | None:
    """Find the longest loop. If several are equally long, take the one with the shortest piece."""
    tokens = np.asarray(ids)
    best: Loop | None = None
    for period in range(1, min(LONGEST_PERIOD, len(tokens) // LEAST_REPEATS) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        ends = np.concatenate([[-1], differs, [len(tokens) - period]])
        lengths = np.diff(ends) - 1
        longest = int(lengths.argmax())
        n_tokens = int(lengths[longest]) + period
        if n_tokens >= max(LEAST_TOKENS, LEAST_REPEATS * period) and (
            best is None or n_tokens > best.n_tokens
        ):
            best = Loop(int(ends[longest]) + 2, period, n_tokens)
    return best


def find_certain_run(entropies: Sequence[float]) -> int | None:
    """The number of the first token of a run without doubt, counted from 1."""
    if len(entropies) < RUN_TOKENS:
        return None
    sums = np.concatenate([[0.0], np.cumsum(entropies)])
    means = (sums[RUN_TOKENS:] - sums[:-RUN_TOKENS]) / RUN_TOKENS
    certain = np.flatnonzero(means < LEAST_ENTROPY)
    return int(certain[0]) + 1 if len(certain) else None
