"""The right name for a mistyped one, and the errors that suggest it.

Options have llama.cpp's names. Users often type the names that other libraries use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import Parameter, signature

from localkv.errors import UsageError

_MAX_TOKENS = "n n_predict num_predict max_new_tokens max_completion_tokens max_output_tokens"
_MEANT = {
    "max_tokens": f"{_MAX_TOKENS} max_length",
    "temperature": "temp",
    "stop": "stop_sequences stop_strings stop_words reverse_prompt",
    "repeat_penalty": "repetition_penalty rep_pen",
    "repeat_last_n": "penalty_last_n",
    "typ_p": "typical typical_p",
    "logprobs": "top_logprobs n_probs",
    "seed": "random_seed random_state",
    "schema": "json_schema response_schema",
    "parse_special": "special",
    "n_ctx": "num_ctx ctx_size context_length max_model_len max_seq_len",
    "n_batch": "num_batch batch_size n_ubatch ubatch_size",
    "n_threads": "num_thread num_threads threads",
    "n_threads_batch": "threads_batch",
    "cache_type_k": "type_k kv_cache_type kv_cache_dtype",
    "cache_type_v": "type_v",
    "progress": "verbose show_progress",
    "on_progress": "progress_callback",
}
MEANT = {other: name for name, others in _MEANT.items() for other in others.split()}
"""Another library's name of an option -> ours."""

_ONE_DEVICE = "the whole model runs on one device, device='cuda' or 'cpu': it can't be divided yet"
_SCHEMA = "schema=... keeps the text to a JSON schema, grammar=... to GBNF or Lark"
_GREEDY = "temperature=0 takes the most likely token each time"
_DIVISIONS = (
    *("n_gpu_layers", "gpu_layers", "num_gpu", "device_map", "tensor_split", "split_mode"),
    *("main_gpu", "n_cpu_moe", "override_tensor", "tensor_buft_overrides"),
)
ADVICE = {
    **dict.fromkeys(_DIVISIONS, _ONE_DEVICE),
    **dict.fromkeys(("format", "response_format"), _SCHEMA),
    **dict.fromkeys(("do_sample", "greedy"), _GREEDY),
    "embedding": "LLM.embed works with every model",
    "stream": "LLM.stream yields the text piece by piece",
}
"""Another library's name of an option -> what to do here."""


class UnknownOptionError(UsageError, TypeError):
    """A call has no such option. It is a `TypeError`, as of any function."""


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt or shortened one comes nearest to.

    Case and the dashes of an option don't count. Among equally near names, the one with nearer
    digits wins; 9 is next to 0, as on a keyboard.
    """
    from difflib import SequenceMatcher

    if len(name) > _LONGEST:
        return None
    wanted = _bare(name)
    names = {other: _bare(other) for other in known}
    longer = [other for other, bare in names.items() if bare.startswith(wanted)]
    if wanted and len(name) > 2 and longer:
        return min(longer, key=lambda other: (len(other), other))
    likeness = {other: SequenceMatcher(None, bare, wanted).ratio() for other, bare in names.items()}
    near = [other for other in names if likeness[other] >= _LEAST_LIKENESS]
    ranked = ((-likeness[other], _between(names[other], wanted), other) for other in near)
    return min(ranked, default=(0.0, 0, None))[2]


_LEAST_LIKENESS = 0.6
_LONGEST = 256
"""Most characters of a name that is compared, since the time grows with their square."""


def _bare(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def _between(one: str, other: str) -> int:
    """The sum of distances between characters of two names: 10 if they differ, less for digits."""
    return sum(
        min(abs(int(a) - int(b)), 10 - abs(int(a) - int(b)))
        if a in _DIGITS and b in _DIGITS
        else 10 * (a != b)
        for a, b in zip(one, other, strict=False)
    )


_DIGITS = "0123456789"
_MOST_LISTED = 10


def unknown_name(what: str, name: object, known: Iterable[str], listing: str = "") -> UsageError:
    """The error about a name that does not exist, with the nearest one.

    Args:
        what: what it should name, such as "unknown device".
        known: the names that exist; the hint has all of them if they are few.
        listing: where the names are listed, for the hint if they are many.
    """
    known = list(known)
    nearest = nearest_name(name, known) if isinstance(name, str) else None
    hint = f"use {', '.join(known)}" if len(known) <= _MOST_LISTED or not listing else listing
    meant = f"; did you mean {nearest}?" if nearest else ""
    return UsageError(f"{what} {name!r:.60}{meant}", hint)


def keywords(function: Callable[..., object]) -> list[str]:
    """The names of a function's arguments that have to be named."""
    parameters = signature(function).parameters.values()
    return [one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY]


def check_options(
    given: Iterable[str], options: Collection[str], others: Mapping[str, Collection[str]]
) -> None:
    """Refuse the first option that a call does not have.

    Args:
        given: names of options.
        options: those that the call has.
        others: other calls, and their options.

    Raises:
        UnknownOptionError: names the option that was meant.
    """
    for name in given:
        if name not in options:
            raise _unknown_option(name, options, others)


def _unknown_option(
    name: str, options: Collection[str], others: Mapping[str, Collection[str]]
) -> UnknownOptionError:
    message = f"unknown option {name!r}"
    meant = MEANT.get(name, name)
    for call, theirs in others.items():
        if meant in theirs and meant not in options:
            return UnknownOptionError(message, hint=f"{meant} is an option of {call}")
    if name in ADVICE:
        return UnknownOptionError(message, hint=ADVICE[name])
    nearest = meant if meant in options else nearest_name(name, options)
    if nearest is not None:
        return UnknownOptionError(f"{message}: did you mean {nearest}?")
    return UnknownOptionError(message, hint=f"options: {', '.join(options)}")
