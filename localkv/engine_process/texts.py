"""The messages about texts, which a server has written from tokens: many at the same time.

It sends `Submit`, `Again`, `Embed`, `Cancel` and `SlotAction`; the engine sends `Facts`, and then
`Step`s, and `Warned` between them.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from localkv.chat.engine import EngineFacts
from localkv.engine.logprobs import TokenLogprob
from localkv.engine.stream import Timings, Usage
from localkv.engine_process.wire import (
    Cancel,
    Failed,
    Message,
    Progress,
    Refused,
    SlotAction,
    decoder,
)
from localkv.loader.answer_tags import ReasoningTags
from localkv.sampling.params import SamplingParams
from localkv.structured.grammar import Grammar


class Opening(msgspec.Struct, frozen=True):
    """What `ChatPrompt` says of the place where an answer begins, without its tokens."""

    opening: str = ""
    is_begun: bool = False
    reasoning: ReasoningTags | None = None
    n_reasoned: int = 0
    reasoning_budget: int | None = None


class Submit(Message, frozen=True):
    """A text that is to go on.

    Attributes:
        id: the front's number of it.
        ids: tokens of the prompt.
        params: how tokens are drawn.
        max_tokens: most tokens; None goes on to the end of the context.
        stop: strings that end it.
        ignore_eos: it never ends by a token.
        logprobs: alternatives of each token; None for none, and no probabilities at all.
        chat: where an answer begins; None for plain text.
        grammar: what the text has to be.
        tells_tokens: its pieces name the tokens that they consist of.
        after_samplers: logprobs belong to the distribution that tokens are drawn from.
        salt: only texts with the same share rows of the cache.
        origin: what the salt stands for, in this process and others.
        reuses: rows that the cache has of the prompt are taken.
        place: by which it can be saved; -1 for the one in which it runs.
        client: who asks.
        lora: scales of adapters by their numbers; None for those that they were loaded with.
        n_indent, line_seconds: what ends it at the beginning of a line (`LineLimits`).
    """

    id: int
    ids: list[int]
    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    chat: Opening | None = None
    grammar: Grammar | None = None
    tells_tokens: bool = False
    after_samplers: bool = False
    salt: int = 0
    origin: bytes = b""
    reuses: bool = True
    place: int = -1
    client: str = ""
    lora: dict[int, float] | None = None
    n_indent: int = 0
    line_seconds: float = 0.0


class Again(Message, frozen=True):
    """Another text like the last `Submit`, with a number and a seed of its own: what many texts
    have in common is sent once."""

    id: int
    seed: int | None


class Embed(Message, frozen=True):
    """Texts that are to become vectors, or to be scored.

    Attributes:
        id: the front's number of the request.
        texts: tokens of each.
        pooling: of vectors; None for the model's own.
        norm: what vectors are divided by (`normalised`); None for norm 2 of a text's vector, and
            for tokens' vectors as they are, without pooling.
        dimensions: how many leading values of vectors are kept; 0 for all.
        scores: they are scored instead, by the first class of the model's head.
    """

    id: int
    texts: list[list[int]]
    pooling: str | None = None
    norm: int | None = None
    dimensions: int = 0
    scores: bool = False


class Vectors(Message, frozen=True):
    """Vectors of an `Embed`, or scores, which are vectors of one value.

    Attributes:
        data: float32 [all vectors, width], one text after the other.
        width: values of a vector.
        counts: vectors of each text: 1, or its tokens' without pooling.
        seconds: that the model took.
    """

    id: int
    data: bytes
    width: int
    counts: tuple[int, ...]
    seconds: float


class SlotDone(Message, frozen=True):
    """It is done. Says how many tokens and bytes it took, and how many milliseconds."""

    id: int
    n_tokens: int
    n_bytes: int
    ms: float


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that was loaded, and the scale of requests that name none."""

    path: str
    scale: float


class Facts(Message, frozen=True):
    """A model is loaded.

    Attributes:
        engine: the model and its cache.
        warm_up_seconds: that it ran before it was ready.
        n_vocab: tokens in its vocabulary.
        n_params: weights.
        n_embd: width.
        n_parallel: requests that run at the same time.
        cache_tokens: that the cache holds of all requests together.
        cache_bytes: what it takes.
        n_pages: of the cache, all groups of layers together.
        kernels: the implementation of each operation, in a few words.
        warnings: one line each for the user.
        adapters: by their numbers.
    """

    engine: EngineFacts
    warm_up_seconds: float
    n_vocab: int
    n_params: int
    n_embd: int
    n_parallel: int
    cache_tokens: int
    cache_bytes: int
    n_pages: int
    kernels: dict[str, str]
    warnings: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()


class Accepted(Message, frozen=True):
    """A request waits, or runs."""

    id: int


class Reading(Message, frozen=True):
    """`n_held` of a prompt's `n_prompt` tokens are evaluated; `n_cached` of them were so before."""

    id: int
    n_prompt: int
    n_cached: int
    n_held: int


class Piece(Message, frozen=True):
    """A text goes on.

    Attributes:
        n_tokens: that were drawn so far.
        logprobs: of the tokens since the last piece, if they were asked for.
        tokens: drawn since the last piece, if they were asked for.
    """

    id: int
    text: str
    n_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    tokens: tuple[int, ...] = ()


class Ended(Message, frozen=True):
    """A text is complete.

    Attributes:
        finish_reason: "stop", "length" or "cancelled".
        stop: the stop string that ended it, if one did.
        error: what went wrong, then; the text is not complete.
        kind: class of the error.
    """

    id: int
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int
    context_full: bool = False
    stop: str | None = None
    error: str | None = None
    kind: str = ""


class DiskStatus(msgspec.Struct, frozen=True):
    """What was read from a prompt cache on the disk, and written (`DiskCounts`).

    Attributes:
        bytes_now: that all its files take, of all servers that use it.
        bytes_queued: copies in memory that wait to be written.
    """

    n_found: int = 0
    n_tokens: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    n_left_out: int = 0
    n_damaged: int = 0
    bytes_now: int = 0
    bytes_queued: int = 0


class Status(msgspec.Struct, frozen=True):
    """What the engine does, and did since it was started (`BatchStats`, `Pages`).

    Attributes:
        running, waiting: requests.
        pages_*: of the cache, all groups of layers together.
        n_*: since the start; `n_prompt` without what was reused.
        busy_seconds: that steps took.
        rows: of the last step: [requests that generate, tokens of prompts].
        step_ms: that it took; 0 if there was none.
        places: the request that runs in each of `n_parallel` places, by its number; 0 for none.
        disk: None without a prompt cache on the disk.
    """

    running: int = 0
    waiting: int = 0
    pages_running: int = 0
    pages_shared: int = 0
    pages_kept: int = 0
    pages_lost: int = 0
    n_steps: int = 0
    n_generated: int = 0
    n_prompt: int = 0
    n_reused: int = 0
    n_preempted: int = 0
    busy_seconds: float = 0.0
    rows: tuple[int, int] = (0, 0)
    step_ms: float = 0.0
    places: tuple[int, ...] = ()
    disk: DiskStatus | None = None


class Warned(Message, frozen=True):
    """Something that a user should know, a line."""

    line: str


Event: TypeAlias = Accepted | Refused | SlotDone | Vectors | Reading | Piece | Ended


class Step(Message, frozen=True):
    """What one step of the engine brought."""

    events: list[Event]
    status: Status


ToEngine: TypeAlias = Submit | Again | Embed | Cancel | SlotAction
FromEngine: TypeAlias = Progress | Facts | Failed | Step | Warned

to_engine = decoder(ToEngine)
from_engine = decoder(FromEngine)
