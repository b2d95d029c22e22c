"""`ChatSession`: a conversation with its settings, written through to the store.

It holds the messages to show and the requests to an engine; it draws nothing and computes nothing.
It can be exported as Markdown, for people to read, and as JSON with all that is kept of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from localkv.chat.conversation import Conversation, Message, split_reasoning
from localkv.chat.database import PATIENCE
from localkv.chat.engine import ChatRequest, EngineFacts, Finished
from localkv.chat.store import SessionCache, Store, chosen_settings
from localkv.config import MIXED
from localkv.errors import ContextOverflowError, LocalKVError, UsageError, printable
from localkv.sampling.params import SamplingParams

NEW_TITLE = "New chat"
TITLE_LENGTH = 60
KEEP_PATIENCE = 0.2
"""Seconds that an answer which is still being written waits for another chat: it is tried again
soon, and the screen waits with it."""


class ChatSession:
    """One conversation. It is stored from its first message on.

    Args:
        store: where.
        model: the file that answers.
        params: how tokens are drawn.
        system_prompt: comes before everything else; blank for none.
        max_tokens, stop, ignore_eos, think, reasoning_budget, prefill, template_kwargs, tools: as
            in `ChatRequest`.

    Attributes:
        model_name: the model's own name, once it is known.
        on_problem: called with the error of a failed write, once until a write succeeds again;
            None raises it instead. A new message that can't be stored is an error in any case.
        id: in the store; None as long as nothing was said.
        is_carried: the settings came along from another session.
        cache: the largest context that it ran with.
    """

    def __init__(
        self,
        store: Store,
        *,
        model: str,
        params: SamplingParams,
        system_prompt: str = "",
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        think: bool | None = None,
        reasoning_budget: int | None = None,
        prefill: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.store = store
        self.model = model
        self.model_name = ""
        self.params = params
        self.system_prompt = system_prompt
        self.max_tokens = max_tokens
        self.stop = tuple(stop)
        self.ignore_eos = ignore_eos
        self.think = think
        self.reasoning_budget = reasoning_budget
        self.prefill = prefill
        self.template_kwargs = dict(template_kwargs or {})
        self.tools = tuple(tools)
        self.title = NEW_TITLE
        self.id: int | None = None
        self.is_carried = False
        self.cache = SessionCache()
        self.conversation = Conversation()
        self.on_problem: Callable[[LocalKVError], None] | None = None
        self._reported: str | None = None
        self._unwritten: dict[int, Message] = {}

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Around a write that the conversation can do without: an error goes to `on_problem`."""
        try:
            yield
            self._reported = None
        except LocalKVError as error:
            if self.on_problem is None:
                raise
            if self._reported != str(error):
                self._reported = str(error)
                self.on_problem(error)

    def new(self) -> ChatSession:
        """An empty session with the same settings."""
        session = ChatSession(
            self.store,
            model=self.model,
            params=self.params,
            system_prompt=self.system_prompt,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            think=self.think,
            reasoning_budget=self.reasoning_budget,
            prefill=self.prefill,
            template_kwargs=self.template_kwargs,
            tools=self.tools,
        )
        session.is_carried = True
        session.model_name = self.model_name
        session.on_problem = self.on_problem
        return session

    def resumed(self, session_id: int) -> ChatSession:
        """A stored session, with its own settings and the model that is loaded now."""
        stored = self.store.session(session_id)
        session = self.new()
        session.id, session.title = stored.id, stored.title
        session.system_prompt = stored.system_prompt
        session.conversation = stored.conversation
        chosen = chosen_settings(stored.settings)
        session.params, session.max_tokens = chosen.params, chosen.max_tokens
        session.think, session.prefill = chosen.think, chosen.prefill
        session.cache = chosen.cache
        return session

    def _settings(self) -> Mapping[str, Any]:
        defaults = asdict(SamplingParams())
        chosen = {k: v for k, v in asdict(self.params).items() if v != defaults[k]}
        if self.think is not None:
            chosen["think"] = self.think
        if self.prefill:
            chosen["prefill"] = self.prefill
        return {**chosen, "max_tokens": self.max_tokens}

    def _stored_settings(self) -> Mapping[str, Any]:
        cache = {} if self.cache.n_ctx is None else {"cache": asdict(self.cache)}
        return {**self._settings(), **cache}

    def runs_with(self, facts: EngineFacts) -> None:
        """Note the session's context, unless it had a larger one before; `save` writes it."""
        if facts.server or (self.cache.n_ctx or 0) >= facts.n_ctx:
            return
        types: tuple[str | None, str | None] = facts.type_k, facts.type_v
        if MIXED in types or facts.layer_types or facts.kv_ladder:
            types = None, None
        self.cache = SessionCache(facts.n_ctx, *types, self.model)

    def carried_over(self) -> list[str]:
        """Settings from the session before that are not the defaults, in words."""
        if not self.is_carried:
            return []
        chosen = {k: v for k, v in self._settings().items() if v is not None}
        said = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items()]
        return [*said, *(["the system prompt"] if self.system_prompt.strip() else [])]

    def save(self) -> None:
        """Write everything but the messages, if there is a session to write."""
        if self.id is None:
            return
        with self._written():
            self.store.update_session(
                self.id,
                title=self.title,
                model=self.model,
                system_prompt=self.system_prompt,
                settings=self._stored_settings(),
                leaf_id=self.conversation.leaf_id,
                dropped_id=self.conversation.dropped_id,
            )

    def rename(self, title: str) -> None:
        self.title = title.strip() or self.title
        self.save()

    def _add(self, parent_id: int | None, role: Any, content: str) -> Message:
        if self.id is None:
            settings = self._stored_settings()
            self.id = self.store.add_session(self.title, self.model, self.system_prompt, settings)
        message = self.store.add_message(self.id, parent_id, role, content)
        self.conversation.add(message)
        self._write_rest()
        self.save()
        return message

    def say(self, text: str) -> Message:
        """The user's next message, after the branch that is shown."""
        if self.title == NEW_TITLE:
            first = next((line for line in text.splitlines() if line.strip()), text)
            self.title = " ".join(first.split())[:TITLE_LENGTH] or NEW_TITLE
        return self._add(self.conversation.leaf_id, "user", text)

    def edit(self, message: Message, text: str) -> Message:
        """Say it differently: a new branch beside `message`."""
        return self._add(message.parent_id, "user", text)

    def begin_answer(self) -> Message:
        """An empty answer to the user's message at the end of the branch."""
        return self._add(self.conversation.leaf_id, "assistant", "")

    def retry(self, message: Message) -> None:
        """Go back to before an answer, for another one beside it."""
        self.conversation.leaf_id = message.parent_id

    @property
    def awaits_answer(self) -> bool:
        """Whether the branch that is shown ends with a message of the user."""
        path = self.conversation.path()
        return bool(path) and path[-1].role == "user"

    @property
    def cut_answer(self) -> Message | None:
        """The answer at the end of the branch, if it ended before its own end."""
        path = self.conversation.path()
        if not path or path[-1].role == "user":
            return None
        is_cut = path[-1].content.strip() and path[-1].finish_reason != "stop"
        return path[-1] if is_cut else None

    def extend(self, message: Message, text: str) -> None:
        """More of an answer; `keep` writes it."""
        message.content += text

    def keep(self, message: Message) -> None:
        """Write the answer so far, so that it outlives this process."""
        self._update(message, patience=KEEP_PATIENCE)

    def finish(self, message: Message, stats: Finished) -> None:
        """The end of an answer."""
        message.finish_reason, message.error = stats.finish_reason, None
        message.stats = stats if message.stats is None else _joined(message.stats, stats)
        self._update(message)
        self.save()

    def fail(self, message: Message, error: str) -> None:
        """The end of an answer that something went wrong with."""
        message.finish_reason, message.error = "error", error
        self._update(message)

    def _update(self, message: Message, *, patience: float = PATIENCE) -> None:
        self._unwritten[message.id] = message
        with self._written():
            self.store.update_message(message, patience=patience)
            del self._unwritten[message.id]
            self._write_rest()

    def _write_rest(self) -> None:
        """Write the messages whose write failed, now that there may be room again."""
        with self._written():
            for message in list(self._unwritten.values()):
                self.store.update_message(message)
                del self._unwritten[message.id]

    def take_back(self, message: Message) -> None:
        """Remove the message at the end, unless other branches go on from it."""
        if all(other.parent_id != message.id for other in self.conversation.messages.values()):
            self.discard(message)

    def discard(self, message: Message) -> None:
        """Take back an answer that is empty, or another message that nothing follows."""
        del self.conversation.messages[message.id]
        self._unwritten.pop(message.id, None)
        self.conversation.leaf_id = message.parent_id
        self.save()
        with self._written():
            self.store.delete_message(message.id)

    def show_branch(self, message: Message) -> None:
        self.conversation.show_branch(message)
        self.save()

    def set_param(self, name: str, value: Any) -> None:
        """Change one field of `SamplingParams`. Raises UsageError."""
        self.params = replace(self.params, **{name: value})
        self.save()

    def request(self) -> ChatRequest:
        """The request to the engine for an answer."""
        return ChatRequest(
            messages=self.conversation.prompt(self.system_prompt),
            params=self.params,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            think=self.think,
            reasoning_budget=self.reasoning_budget,
            prefill=self.prefill,
            template_kwargs=self.template_kwargs,
            tools=self.tools,
        )

    def continue_request(self, message: Message) -> ChatRequest:
        """The request for the rest of an answer at the end of the branch."""
        before = self.conversation.prompt(self.system_prompt, before=message)
        return replace(self.request(), messages=before, prefill="", continued=message.content)

    def last_turn_request(self) -> ChatRequest:
        """The request as it would be if all turns before the last were dropped."""
        turns = self.conversation.turns()
        last = self.conversation.prompt(self.system_prompt, since=turns[-1][0] if turns else None)
        return replace(self.request(), messages=last)

    def drop_oldest_turns(self, n_ctx: int, count_tokens: Callable[[ChatRequest], int]) -> int:
        """Stop telling the model the oldest turns, until a quarter of the context is free.

        They stay in the session and on the screen. Nothing is saved, so that this may run in a
        thread of its own.

        Args:
            n_ctx: tokens of context.
            count_tokens: an engine's.

        Returns:
            how many turns were dropped.

        Raises:
            ContextOverflowError: the last turn alone is too long; nothing was dropped.
        """
        before = self.conversation.dropped_id
        n_dropped = 0
        while (n_tokens := count_tokens(self.request())) > n_ctx * 3 // 4:
            turns = self.conversation.turns()
            if len(turns) < 2:
                if n_tokens < n_ctx and n_dropped:
                    break
                self.conversation.dropped_id = before
                raise ContextOverflowError(
                    f"the last message alone takes {n_tokens} of {n_ctx} tokens",
                    hint="shorten it (edit), or take a larger context",
                )
            self.conversation.dropped_id = turns[0][-1].id
            n_dropped += 1
        return n_dropped


def _joined(first: Finished, then: Finished) -> Finished:
    """The figures of an answer that was continued."""
    n_tokens = first.completion_tokens + then.completion_tokens
    seconds = first.decode_seconds + then.decode_seconds
    # as many steps as the two rates were taken over
    steps = sum(part.decode_per_second * part.decode_seconds for part in (first, then))
    return replace(
        first,
        finish_reason=then.finish_reason,
        completion_tokens=n_tokens,
        decode_seconds=seconds,
        decode_per_second=steps / seconds if seconds else 0.0,
        context_full=then.context_full,
    )


def sampling_value(name: str, text: str) -> Any:
    """A number for a field of `SamplingParams`, from a user's text.

    Raises:
        LocalKVError: there is no such field with a number, or it is none.
    """
    default = getattr(SamplingParams(), name, None)
    if name == "seed":
        default = -1
    if not isinstance(default, int | float) or isinstance(default, bool):
        raise LocalKVError(f"no such setting {name!r}")
    try:
        return type(default)(text)
    except ValueError:
        kind = "whole number" if isinstance(default, int) else "number"
        raise LocalKVError(f"{name}: {text!r} is not a {kind}") from None


NAME_BYTES = 100
"""Most bytes of a name that is made from a title: file systems take 255, some fewer."""


def to_markdown(session: ChatSession) -> str:
    """The branch that is shown, with reasoning folded away."""
    parts = [f"# {session.title}"]
    if session.system_prompt.strip():
        parts.append(f"**System:** {session.system_prompt.strip()}")
    for message in session.conversation.path():
        parts += _turn(message, session.model_name)
    return "\n\n".join(parts) + "\n"


def _turn(message: Message, model_name: str) -> list[str]:
    if message.role == "user":
        return ["## You", message.content.strip()]
    parts = split_reasoning(message.content)
    turn = [f"## {model_name or 'Assistant'}"]
    if parts.reasoning:
        summary = "<summary>Reasoning</summary>"
        turn.append(f"<details>{summary}\n\n{parts.reasoning}\n\n</details>")
    turn.append(parts.answer.strip())
    if message.finish_reason not in ("stop", "length"):
        turn.append(f"*({message.finish_reason or 'interrupted'})*")
    return turn


def to_json(session: ChatSession) -> str:
    """All branches; `shown` lists the ids of the one that is shown."""
    fields = {
        "title": session.title,
        "model": session.model_name,
        "system_prompt": session.system_prompt,
        "sampling": asdict(session.params),
        "shown": [message.id for message in session.conversation.path()],
        "messages": [asdict(message) for message in session.conversation.messages.values()],
    }
    return json.dumps(fields, ensure_ascii=False, indent=2) + "\n"


def default_name(title: str, suffix: str) -> str:
    """A file name that says which conversation it holds."""
    words = "-".join(re.findall(r"\w+", title[:1000].lower())[:8])
    short = words.encode()[:NAME_BYTES].decode(errors="ignore")
    return f"{short or 'chat'}.{suffix}"


def export(session: ChatSession, path: Path) -> None:
    """Write a conversation, in the format that the file's name ends with; never over a file.

    Raises:
        UsageError: the ending is neither .md nor .json, or the file is there or can't be made.
    """
    write = {".md": to_markdown, ".json": to_json}.get(path.suffix)
    if write is None:
        raise UsageError(f"{printable(path)}: the name must end in .md or .json")
    text = write(session)
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()  # a part of a conversation is none
                raise
    except FileExistsError:
        raise UsageError(f"{printable(path)} exists already", hint="name another file") from None
    except OSError as error:
        raise UsageError(f"{printable(path)}: {error.strerror}") from error
