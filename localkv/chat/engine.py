"""Requests of a conversation to an engine, and its reports: plain values, no torch.

`LocalEngine` answers in this process, `EngineProcess` in a child. Users can't distinguish
them, except that a child can die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

from localkv.arch.spec import CacheGroup
from localkv.errors import LocalKVError
from localkv.sampling.params import SamplingParams
from localkv.system.threads import Threads

LOAD_STAGES = ("header", "runtime", "weights", "kernels")
"""Stages of loading: the file's header, the libraries (torch on a GPU only), the weights, and
compiling with a first run."""
WARM_UP = "warm-up"
"""A stage that a server's engine has after them: the model runs once."""


class EngineStoppedError(LocalKVError):
    """The engine is gone, by itself or because somebody ended it; a new one can be started."""


@dataclass(frozen=True)
class EngineOptions:
    """The model to load, and how.

    Attributes:
        model: path of a GGUF file.
        arguments: keyword arguments of `LLM`; values of JSON.
        chat_template: a Jinja template instead of the model's own.
        variables: of the template, which requests will have.
        uses: "tools" and "reasoning_budget", if requests will have them. The facts warn of these
            and of the variables where they have no effect.
    """

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    uses: Sequence[str] = ()


@dataclass(frozen=True)
class LoadProgress:
    """Loading has come to a stage of `LOAD_STAGES`, or `WARM_UP`: `done` of `total` parts, if
    counted."""

    stage: str
    done: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        if self.stage not in (*LOAD_STAGES, WARM_UP):
            raise ValueError(f"loading has no stage {self.stage!r}")


@dataclass(frozen=True)
class EngineFacts:
    """Facts about a loaded model and its cache. Sizes are counts; `*_bytes` are bytes.

    `layers`, `kv_heads`, `key_dims`, `value_dims`, `windows`, `are_latent`: of each group of its
    layers (`CacheGroup`). `n_batch`: most prompt tokens evaluated at a time.
    `kv_ladder`: pairs as "q8_0/q4_0" that pages go through within `kv_budget`, if there is one:
    the bytes of the layers whose pages do.
    `pairs`: of each group, "q8_0/q4_0", where layers have types of their own.
    `n_threads_batch`: where several tokens are evaluated at once; None for the same as others.
    `server`: the address of the one that it is loaded in; "" for a process of our own, and 0 is a
    context that another one does not tell.
    `has_think_switch`, `takes_tools`: its chat template reads `enable_thinking`, and tools.
    """

    name: str
    architecture: str
    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    n_ctx_train: int
    n_ctx: int
    type_k: str
    type_v: str
    kv_rotation: str
    weight_bytes: int
    backend: str
    n_threads: int
    load_seconds: float
    warnings: tuple[str, ...] = ()
    has_think_switch: bool = False
    takes_tools: bool = False
    windows: tuple[int, ...] = ()
    n_batch: int = 512
    n_threads_batch: int | None = None
    type_k_swa: str | None = None
    type_v_swa: str | None = None
    swa_full: bool = False
    are_latent: tuple[bool, ...] = ()
    type_k_rope: str = "f16"
    pairs: tuple[str, ...] = ()
    kv_tail: int | None = None
    kv_sink: int | None = None
    kv_budget: int | None = None
    kv_ladder: tuple[str, ...] = ()
    server: str = ""

    @property
    def threads(self) -> Threads:
        return Threads(self.n_threads, self.n_threads_batch or self.n_threads)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of layers, numbered as if they followed each other in the model."""
        windows = self.windows or (0,) * len(self.layers)
        latent = self.are_latent or (False,) * len(self.layers)
        sizes = zip(self.kv_heads, self.key_dims, self.value_dims, windows, strict=True)
        ends = accumulate(self.layers)
        return tuple(
            CacheGroup(*size, tuple(range(end - n, end)), is_latent=is_latent)
            for n, end, size, is_latent in zip(self.layers, ends, sizes, latent, strict=True)
        )

    @property
    def layer_types(self) -> tuple[tuple[str, str], ...]:
        """Types of these layers, in the form of `CacheConfig`; empty if all have the same."""
        pairs = (tuple(pair.split("/")) for pair in self.pairs)
        return tuple(
            (k, v) for n, (k, v) in zip(self.layers, pairs, strict=False) for _ in range(n)
        )


@dataclass(frozen=True)
class ChatRequest:
    """One answer that is wanted.

    Attributes:
        messages: {"role": "system" | "user" | "assistant", "content": text}, in order.
        params: how tokens are drawn.
        max_tokens: most tokens of the answer; None goes on to the end of the context.
        stop: strings that end it.
        ignore_eos: never draw a token that ends it.
        think: whether the model reasons before it answers; None leaves it to the template.
        reasoning_budget: most tokens of reasoning; None and -1 set no limit, 0 allows none.
        prefill: the answer begins with this text, which comes as its first delta.
        continued: an answer so far, with its reasoning, that goes on; `messages` end before it, and
            the deltas hold what is new.
        template_kwargs: more variables of the chat template; values of JSON.
        tools: descriptions of tools as JSON schemas.
        audit: keep what an audit of this answer needs, which then takes half as long.
    """

    messages: Sequence[Mapping[str, str]]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    think: bool | None = None
    reasoning_budget: int | None = None
    prefill: str = ""
    continued: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    audit: bool = False


@dataclass(frozen=True)
class PromptProgress:
    """`n_read` of a prompt's `n_prompt` tokens are evaluated; `n_cached` were before it came."""

    n_read: int
    n_prompt: int
    n_cached: int = 0


@dataclass(frozen=True)
class TextDelta:
    """More of an answer.

    Attributes:
        text: may be empty while a character or a stop string is incomplete.
        seconds: one value per token since the last delta: how long it took after the one before.
            The first token of an answer took the prompt as well, and is not among them.
        n_tokens: tokens in the context so far, prompt and answer.
        pages: of a cache with a budget: how many have each pair of types of its ladder.
    """

    text: str
    seconds: tuple[float, ...] = ()
    n_tokens: int = 0
    pages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end of an answer, with the fields of `Completion`.

    `degenerate`: what is wrong with it and what would help, in one line; empty for nothing.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prompt_seconds: float
    decode_seconds: float
    decode_per_second: float
    seed: int
    context_full: bool = False
    lost_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verified_batches: int = 0
    degenerate: str = ""
    requantised_pages: int = 0
    requantise_seconds: float = 0.0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Audited:
    """What the packed cache changed in the last answer (`localkv.engine.audit.Audit`).

    Attributes:
        line: all of it in one line; empty if it was cancelled, or the answer has no tokens.
        text: the answer; only what was new, if it was continued.
        n_tokens: of the answer.
        kld_mean: the mean divergence, in nats.
        flips: in words, one for each token with another most likely choice.
        starts, ends: the characters of `text` that each of these tokens became.
    """

    line: str = ""
    text: str = ""
    n_tokens: int = 0
    kld_mean: float = 0.0
    flips: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


AnswerNews: TypeAlias = PromptProgress | TextDelta | Finished


class ChatEngine(Protocol):
    """Loads one model and answers one request at a time.

    `load`, `answer`, `audit` and `count_tokens` block and belong in a thread; `cancel` and `close`
    return at once and may be called from any thread.
    """

    def load(self, on_progress: Callable[[LoadProgress], None]) -> EngineFacts:
        """Load, and tell how far it is. Raises LocalKVError."""
        ...

    def answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        """Answer; `PromptProgress` may come first, and `Finished` comes last.

        Raises:
            ContextOverflowError: the conversation does not fit the context.
            EngineStoppedError: the engine is gone.
            LocalKVError: anything else a user can do something about.
        """
        ...

    def audit(self) -> Iterator[Audited]:
        """What the packed cache changed in the last answer: one value, unless it is an error.

        Raises:
            EngineStoppedError: the engine is gone.
            LocalKVError: there is no answer, or no memory for an f16 cache.
        """
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens that a request takes as a prompt. Raises the errors of `answer`."""
        ...

    def save_state(self, path: str) -> int:
        """Write what was evaluated last to a file; its tokens. Raises LocalKVError."""
        ...

    def load_state(self, path: str) -> int:
        """Take such a file into the cache; its tokens. Raises LocalKVError."""
        ...

    def cancel(self) -> None:
        """End the answer that is being written after its next token, or the audit after a batch."""
        ...

    def close(self) -> None:
        """Free everything; calls that still block end with EngineStoppedError."""
        ...
