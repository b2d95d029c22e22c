"""The lists that options of `localkv calibrate` are: types, budgets of bits, tails. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from localkv.cache.tail import DEFAULT_TAIL
from localkv.cli.options.cache_pairs import require_cache_type
from localkv.config import MOST_EXACT
from localkv.errors import UsageError
from localkv.formats import KV_FORMATS

TAILS_OF_CHUNK = 4
"""So many times a tail is a chunk at least: half of it is scored, whose first token then reads as
many packed tokens as there are in the tail, and its last three times as many."""


def types_of(text: str | None) -> list[str]:
    """The types that `--types` names, f16 in front of them; none if it is not given."""
    names = [item.strip().lower() for item in (text or "").split(",") if item.strip()]
    for name in names:
        require_cache_type(name, "--types: ")
    if text is not None and not set(names) - {"f16"}:
        raise UsageError("--types names no type to compare with f16", hint="as in q8_0,q5_1,q4_0")
    return list(dict.fromkeys(["f16", *names])) if names else []


def budgets_of(text: str | None) -> list[float]:
    """The bits per value that `--bits` names; none if it is not given."""
    if text is None:
        return []
    try:
        found = [float(item) for item in text.split(",")]
    except ValueError:
        found = [-1.0]
    if any(not 0 < bits <= 32 for bits in found):
        raise UsageError(f"--bits {text}: not a list of bits per value", hint="as in 4.5,5,6")
    return found


def tails_of(text: str, names: list[str]) -> tuple[int, ...]:
    """The tails that `--kv-tail` names."""
    items = [item.strip() for item in text.split(",")]
    are_numbers = all(item.isdecimal() and len(item) < 10 for item in items)
    tails = tuple(dict.fromkeys(map(int, items))) if are_numbers else ()
    if not tails or max(tails) > MOST_EXACT:
        raise UsageError(f"--kv-tail {text}: not a list of tokens", hint="as in 0,64")
    needing = [name for name in names if KV_FORMATS[name].group_tokens > 1]
    if needing and not any(tails):
        raise UsageError(
            f"--types {needing[0]} packs {KV_FORMATS[needing[0]].group_tokens} tokens together, "
            "and --kv-tail 0 measures types that need no tail",
            hint=f"as in --kv-tail 0,{DEFAULT_TAIL}",
        )
    return tails


def check_budgets(named: Sequence[float], budgets: Sequence[float], least: float) -> None:
    """Refuse, before anything is measured, fewer bits than the smallest of the types has.

    Args:
        named: those that the user wants, each of which must hold some types.
        budgets: all, one of which must.
        least: bits per value of the smallest types that rows of the model can be of.
    """
    for bits in named:
        if bits < least:
            raise UsageError(
                f"--bits {bits:g} holds none of the types, the smallest of which has {least:g}",
                hint=f"as in --bits {least:g}, or with smaller --types",
            )
    if max(budgets) < least:
        raise UsageError(
            f"the smallest types that go with this model's heads have {least:g} bits per value, "
            f"and {max(budgets):g} is the largest budget",
            hint=f"with other --types, or --bits {least:g}",
        )


def check_tails(tails: Sequence[int], n_tokens: int) -> None:
    """Refuse a tail that would hide what types cost: where tokens read hardly any others packed,
    all types look alike, and those of fewest bits best.

    Args:
        n_tokens: of a chunk.
    """
    needed = TAILS_OF_CHUNK * max(tails)
    if n_tokens < needed:
        raise UsageError(
            f"a tail of {max(tails)} tokens is measured with {needed} tokens at a time at least, "
            f"and these are {n_tokens}",
            hint="take a longer text (-f, --tokens), or --kv-tail 0",
        )
