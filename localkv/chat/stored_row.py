"""From rows of the file of sessions to values, and which rows are damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from localkv.chat.conversation import ENDINGS, Message, Role
from localkv.chat.engine import Finished
from localkv.chat.wire import checked, sampling_params_from_json
from localkv.errors import UsageError
from localkv.sampling.params import SamplingParams

MESSAGE_COLUMNS = "id, parent_id, role, content, finish_reason, stats, error"

_FINISHED = {field.name for field in fields(Finished)}


def message_of(row: Sequence[Any]) -> Message:
    """The message of a row of `MESSAGE_COLUMNS`.

    Raises:
        ValueError: it is damaged.
    """
    number, parent_id, role, content, reason, stats, error = row
    if role not in get_args(Role):
        raise ValueError(f"message {number} is neither the user's nor an answer")
    try:
        values = (parent_id, role, content, reason, None, error)
        message = checked(Message, dict(zip(_MESSAGE_FIELDS, (number, *values), strict=True)))
        check_ending(reason)
        message.stats = stats_of(stats)
    except ValueError as wrong:
        raise ValueError(f"message {number}: {wrong}") from None
    return message


_MESSAGE_FIELDS = [field.name for field in fields(Message)]


def check_ending(reason: Any) -> None:
    """Refuse what is no `finish_reason` of a message.

    Raises:
        ValueError: it is none.
    """
    if reason is not None and reason not in ENDINGS:
        raise ValueError(f"its finish_reason is {reason!r:.60}")


def stats_of(text: Any) -> Finished | None:
    """The figures of an answer; fields of later versions are left out.

    Raises:
        ValueError: they are damaged.
    """
    if text is None:
        return None
    values = _json_object(text, "stats")
    return checked(Finished, {k: v for k, v in values.items() if k in _FINISHED})


def settings_of(text: Any) -> Mapping[str, Any]:
    """The settings of a session.

    Raises:
        ValueError: it is damaged.
    """
    settings = _json_object(text, "settings")
    chosen_settings(settings)
    return settings


@dataclass(frozen=True)
class SessionCache:
    """The largest context that a session ran with, and the types of K and V in it.

    Attributes:
        n_ctx: tokens; None if it has not run here.
        type_k, type_v: None where layers have types of their own.
        model: the file that it ran with.
    """

    n_ctx: int | None = None
    type_k: str | None = None
    type_v: str | None = None
    model: str = ""


@dataclass(frozen=True)
class ChosenSettings:
    """The settings of a session.

    Attributes:
        params: how tokens are drawn.
        max_tokens: at most; None is as many as there is room for.
        think, prefill: as in `ChatRequest`.
        cache: that it ran with.
    """

    params: SamplingParams
    max_tokens: int | None = None
    think: bool | None = None
    prefill: str = ""
    cache: SessionCache = SessionCache()


def chosen_settings(settings: Mapping[str, Any]) -> ChosenSettings:
    """The values of stored settings.

    Raises:
        ValueError: there are no such settings, or they have no such values.
    """
    values = dict(settings)
    others = {name: values.pop(name) for name in _NOT_SAMPLING if name in values}
    cache = others.pop("cache", {})
    if not isinstance(cache, Mapping):
        raise ValueError(f"its cache is {repr(cache)[:60]}")
    try:
        others["cache"] = checked(SessionCache, cache)
        params = sampling_params_from_json({**asdict(SamplingParams()), **values})
        chosen = checked(ChosenSettings, {"params": params, **others})
    except UsageError as error:
        raise ValueError(error.message) from None
    if chosen.max_tokens is not None and chosen.max_tokens < 0:
        raise ValueError(f"its max_tokens is {chosen.max_tokens}")
    if chosen.cache.n_ctx is not None and chosen.cache.n_ctx < 1:
        raise ValueError(f"its context is {chosen.cache.n_ctx}")
    return chosen


_NOT_SAMPLING = ("max_tokens", "think", "prefill", "cache")


def _json_object(text: Any, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"its {name} can't be read")
    return value
