"""What an answer took, in the words of OpenAI and of llama-server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.server.wire import Ended


def openai_usage(ends: Sequence[Ended], n_reasoned: int = 0) -> dict[str, Any]:
    """The object `usage` of one answer or of several to the same prompt.

    Args:
        n_reasoned: tokens of all of them that are reasoning.
    """
    n_prompt = ends[0].usage.prompt_tokens if ends else 0
    n_completion = sum(end.usage.completion_tokens for end in ends)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {
            "cached_tokens": ends[0].usage.cached_tokens if ends else 0,
        },
        "completion_tokens_details": {"reasoning_tokens": n_reasoned},
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
