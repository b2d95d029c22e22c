"""What `localkv complete` says of a completion, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from localkv.cache.codebook_uses import codebooks_in_words
from localkv.cache.layer_types import in_words
from localkv.cli.complete.waited import Waited
from localkv.cli.model.loading import all_warnings
from localkv.cli.model.memory import cache_types, groups_json, memory_bytes, memory_json
from localkv.errors import byte_size, counted

if TYPE_CHECKING:
    from localkv.config import CacheConfig
    from localkv.engine.text.stream import Completion, Usage
    from localkv.llm import LLM


def summary_lines(llm: LLM) -> list[str]:
    """What `--verbose` says: the model, and what runs it."""
    segments = [spec for layout in llm.engine.cache.layouts for spec in layout.segments]
    rotations = [("K", spec.rotation_k) for spec in segments]
    rotations += [("V", spec.rotation_v) for spec in segments]
    rotated = "".join(f"{side} rotated by {n}, " for side, n in dict.fromkeys(rotations) if n)
    device = llm.backend.name + (f", {llm.backend.hardware}" if llm.backend.hardware else "")
    model = f"{llm.config.name}: {llm.config.architecture}"
    kernels = (f"{operation}: {words}" for operation, words in llm.kernels.items())
    if not llm.backend.hardware:
        device += f", {llm.engine.slot.threads.in_words()}"
    types = [f"K/V by layer: {in_words(llm.cache.layer_types)}"] if llm.cache.layer_types else []
    if books := codebooks_in_words(llm.engine.cache.codebooks):
        types.append(f"codebooks: {books}")
    spec = llm.speculation
    guesses = f"speculation: {spec.drafter}, up to {counted(spec.draft_max, 'token')} at a time"
    return [f"{model}, {rotated}on {device}", *types, *kernels, *[guesses] * spec.is_on]


def report_json(llm: LLM, completion: Completion, waited: Waited) -> dict[str, Any]:
    """The object that `--json` prints."""
    result = asdict(replace(completion, logprobs=None))
    for name in ("logprobs", "tool_calls", "content"):  # no tools, no calls
        del result[name]
    if completion.audit is None:
        del result["audit"]
    if completion.logprobs is not None:
        from localkv.engine.logprobs import as_openai

        result["logprobs"] = as_openai(completion.logprobs)
    waits = {f"{name}_seconds": seconds for name, seconds in asdict(waited).items()}
    result["timings"] = {**waits, **result["timings"]}
    return {
        **result,
        "model": {
            "path": str(llm.gguf.path),
            "name": llm.config.name,
            "architecture": llm.config.architecture,
        },
        "cache": {
            **_types_json(llm.cache),
            "n_ctx": llm.cache.n_ctx,
            "bytes": llm.memory.cache_k + llm.memory.cache_v,
            "groups": groups_json(llm.memory),
        },
        "memory": memory_json(llm.memory),
        "backend": llm.backend.name,
        "warnings": all_warnings(llm),
    }


def _types_json(cache: CacheConfig) -> dict[str, Any]:
    """The types of K and of V, and of each layer where these differ."""
    type_k, type_v = cache.shown_types
    layers = [pair and "/".join(pair) for pair in cache.layer_types]
    found: dict[str, Any] = {"type_k": type_k, "type_v": type_v}
    if cache.kv_budget is not None:
        found["ladder"] = ["/".join(pair) for pair in cache.kv_ladder]
    return {**found, **({"layer_types": layers} if layers else {})}


def stats_lines(llm: LLM, completion: Completion, waited: Waited) -> list[str]:
    """What `--stats` says: seconds, bytes, and what came of guesses and of a budget."""
    usage, timings = completion.usage, completion.timings
    evaluated = counted(usage.prompt_tokens - usage.cached_tokens, "token")
    generated = counted(usage.completion_tokens, "token")
    return [
        f"start:        {waited.start:.2f} s",
        f"load:         {waited.load:.2f} s",
        f"first token:  {waited.first_token:.2f} s",
        f"prompt eval:  {evaluated} in {timings.prompt_seconds:.2f} s, "
        f"{timings.prompt_per_second:.2f} tokens/s",
        f"eval:         {generated} in {timings.decode_seconds:.2f} s, "
        f"{timings.decode_per_second:.2f} tokens/s",
        *_speculated(llm, usage),
        *_requantised(llm, completion),
        f"cache:        {cache_types(llm)}, "
        f"{usage.total_tokens} of {llm.cache.n_ctx} tokens, "
        f"{byte_size(llm.memory.cache_k + llm.memory.cache_v)}",
        f"memory:       {memory_bytes(llm.memory)}",
        f"attention:    {llm.kernels['attention']}",
        f"products:     {llm.kernels['products']}",
        f"finished:     {completion.finish_reason}, seed {completion.seed}",
    ]


def _requantised(llm: LLM, completion: Completion) -> list[str]:
    """What became of the pages of a cache with a budget."""
    ladder = llm.engine.cache.ladder
    if ladder is None:
        return []
    seconds = completion.timings.requantise_seconds
    pairs = ("/".join(pair) for pair in llm.cache.kv_ladder)
    mix = ", ".join(f"{n} in {pair}" for n, pair in zip(ladder.counts(), pairs, strict=True) if n)
    pages = counted(completion.usage.requantised_pages, "page")
    return [f"requantised:  {pages} in {seconds:.3f} s; now {mix}"]


def _speculated(llm: LLM, usage: Usage) -> list[str]:
    """What came of guesses, if there could be any."""
    if not llm.speculation.is_on:
        return []
    drafted = counted(usage.drafted_tokens, "drafted token")
    share = f" ({usage.accepted_tokens / usage.drafted_tokens:.0%})" if usage.drafted_tokens else ""
    verified = counted(usage.verified_batches, "verification")
    return [f"speculation:  {usage.accepted_tokens} of {drafted} accepted{share}, in {verified}"]
