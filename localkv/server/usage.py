"""What an answer took, in the words of OpenAI and of llama-server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.server.running_timings import RunningTimings
from localkv.server.wire import Ended, Reading


def openai_usage(ends: Sequence[Ended], n: int | None = None) -> dict[str, Any]:
    """The object `usage` of one answer or of several.

    Args:
        ends: of the answers, those to the same prompt next to each other.
        n: answers to each prompt; None if there is one prompt only.
    """
    firsts = ends[:: n or max(1, len(ends))]
    n_prompt = sum(end.usage.prompt_tokens for end in firsts)
    n_completion = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(end.usage.cached_tokens for end in firsts),
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(end.usage.reasoning_tokens for end in ends),
        },
    }


def native_timings(end: Ended) -> dict[str, Any]:
    """llama-server's object `timings`; milliseconds."""
    usage, timings = end.usage, end.timings
    n_read = usage.prompt_tokens - usage.cached_tokens
    n_drawn = usage.completion_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": n_read,
        "prompt_ms": 1e3 * timings.prompt_seconds,
        "prompt_per_token_ms": 1e3 * timings.prompt_seconds / max(1, n_read),
        "prompt_per_second": timings.prompt_per_second,
        "predicted_n": n_drawn,
        "predicted_ms": 1e3 * timings.decode_seconds,
        "predicted_per_token_ms": 1e3 * timings.decode_seconds / max(1, n_drawn),
        "predicted_per_second": timings.decode_per_second,
        **(
            {"draft_n": usage.drafted_tokens, "draft_n_accepted": usage.accepted_tokens}
            if usage.drafted_tokens
            else {}
        ),
    }


def prompt_progress(now: Reading, timings: RunningTimings) -> dict[str, Any]:
    """llama-server's object of how far a prompt is evaluated."""
    return {
        "total": now.n_prompt,
        "cache": now.n_cached,
        "processed": now.n_held,
        "time_ms": timings.milliseconds,
    }
