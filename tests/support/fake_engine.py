"""A scripted `ChatEngine`: says and waits what a test tells it to, and counts words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event

from localkv.chat.engine import (
    LOAD_STAGES,
    AnswerNews,
    Audited,
    ChatRequest,
    EngineFacts,
    Finished,
    LoadProgress,
    PromptProgress,
    TextDelta,
)
from localkv.errors import ContextOverflowError, LocalKVError

FACTS = EngineFacts(
    name="tiny-tales",
    architecture="llama",
    layers=(16,),
    kv_heads=(8,),
    key_dims=(64,),
    value_dims=(64,),
    n_ctx_train=4096,
    n_ctx=1024,
    type_k="q4_0",
    type_v="q8_0",
    kv_rotation="auto",
    weight_bytes=770 << 20,
    backend="cpu",
    n_threads=3,
    load_seconds=2.5,
)
TOKEN_SECONDS = 0.02


class Wait:
    """In a script: nothing more is said until the test lets it, or cancels."""

    def __init__(self) -> None:
        self.reached = Event()
        self.over = Event()


def count_words(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(2 + len(message["content"].split()) for message in messages)


Script = Sequence[str | Wait | Exception | PromptProgress]


class FakeEngine:
    """Answers from scripts, one per request; a word is a token, and a message takes two more.

    Attributes:
        requests: what was asked.
        closed: whether somebody has closed it.
        n_audits: how often an audit was begun.
        auditing: what happens in one; then `finds` is found.
        guesses: more fields of `Finished`.
    """

    def __init__(
        self,
        *answers: Script,
        facts: EngineFacts = FACTS,
        loading: Script = (),
        context_full: bool = False,
    ) -> None:
        self.answers = list(answers)
        self.facts = facts
        self.loading = loading
        self.context_full = context_full
        self.guesses: dict[str, int] = {}
        self.requests: list[ChatRequest] = []
        self.closed = False
        self._cancelled = Event()
        self._told: list[str] = []
        self.saved: list[str] = []
        self.loaded: list[str] = []
        self.n_audits = 0
        self.auditing: Script = ()
        self.finds = Audited()
        self.refuses_state: LocalKVError | None = None

    def load(self, on_progress: Callable[[LoadProgress], None]) -> EngineFacts:
        for stage in LOAD_STAGES:
            on_progress(LoadProgress(stage, 3, 16) if stage == "weights" else LoadProgress(stage))
            if stage == "weights":
                list(self._play(self.loading))
        return self.facts

    def _play(self, script: Script) -> Iterator[str | PromptProgress]:
        """The words of a script, and how far its prompt is read, up to where it is cancelled."""
        for item in script:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, Wait):
                item.reached.set()
                while not (item.over.wait(0.01) or self._cancelled.is_set()):
                    pass
            elif not self._cancelled.is_set():
                yield item
            if self._cancelled.is_set():
                return

    def count_tokens(self, request: ChatRequest) -> int:
        return count_words(request.messages)

    def answer(self, request: ChatRequest) -> Iterator[AnswerNews]:
        self.requests.append(request)
        self._cancelled.clear()
        n_prompt = count_words(request.messages)
        if n_prompt > self.facts.n_ctx:
            raise ContextOverflowError(
                f"the prompt has {n_prompt} tokens, but the context holds {self.facts.n_ctx}"
            )
        told = [message["content"] for message in request.messages]
        n_same = 0
        for ours, theirs in zip(self._told, told, strict=False):
            n_same += ours == theirs
        self._told = told
        n_said = 0
        for piece in self._play(self.answers.pop(0)):
            if isinstance(piece, PromptProgress):
                yield piece
                continue
            n_said += 1
            # steady, but for a hiccup every ninth token
            seconds = TOKEN_SECONDS * (1.5 if n_said % 9 == 0 else 1)
            yield TextDelta(piece, (seconds,), n_prompt + n_said)
        cancelled = self._cancelled.is_set()
        yield Finished(
            finish_reason="cancelled" if cancelled else "length" if self.context_full else "stop",
            prompt_tokens=n_prompt,
            completion_tokens=n_said,
            cached_tokens=count_words(request.messages[:n_same]),
            prompt_seconds=0.25,
            decode_seconds=TOKEN_SECONDS * n_said,
            decode_per_second=1 / TOKEN_SECONDS,
            seed=42,
            context_full=self.context_full and not cancelled,
            **self.guesses,
        )

    def audit(self) -> Iterator[Audited]:
        self._cancelled.clear()
        self.n_audits += 1
        return self._audit()

    def _audit(self) -> Iterator[Audited]:
        list(self._play(self.auditing))
        yield Audited() if self._cancelled.is_set() else self.finds

    def save_state(self, path: str) -> int:
        Path(path).write_text("\n".join(self._told))
        self.saved.append(path)
        return 7

    def load_state(self, path: str) -> int:
        self.loaded.append(path)
        if self.refuses_state is not None:
            raise self.refuses_state
        return 7

    def cancel(self) -> None:
        self._cancelled.set()

    def close(self) -> None:
        self.closed = True
        self._cancelled.set()
