"""The fields that all requests for a text have, in OpenAI's words and llama-server's."""

from __future__ import annotations

from typing import Any

import msgspec

from localkv.server import limits
from localkv.server.failures import RequestError, unsupported
from localkv.server.front import Front
from localkv.server.sampling_fields import SamplingFields, stop_strings
from localkv.server.structure import STRUCTURE, grammar_of
from localkv.structured.grammar import Grammar


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field for what a text has to be: one of these."""

    json: limits.Object | limits.GrammarText | None = None
    regex: limits.GrammarText | None = None
    choice: limits.TextChoices | None = None
    grammar: limits.GrammarText | None = None
    json_object: bool | None = None
    structural_tag: limits.Object | limits.GrammarText | None = None
    whitespace_pattern: limits.GrammarText | None = None


class RequestFields(SamplingFields, kw_only=True):
    """What each API adds fields of its own to; None is the default."""

    model: limits.Name | None = None
    stream: bool | None = None
    max_tokens: limits.Tokens | None = None
    max_completion_tokens: limits.Tokens | None = None
    n_predict: limits.Tokens | None = None
    n: limits.Choices | None = None
    stop: limits.StopString | limits.Stops | None = None
    response_format: limits.Object | None = None
    json_schema: limits.Object | None = None
    grammar: limits.GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: limits.Object | limits.GrammarText | None = None
    guided_regex: limits.GrammarText | None = None
    guided_choice: limits.TextChoices | None = None
    guided_grammar: limits.GrammarText | None = None
    cache_prompt: bool | None = None
    id_slot: limits.Int32 | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None

    @property
    def reuses(self) -> bool:
        """Whether what the cache has of the prompt is taken."""
        return self.cache_prompt is not False


def place_of(front: Front, body: RequestFields) -> int:
    """The place that a text is kept for, to be saved; -1 for the one in which it runs.

    Raises:
        RequestError: there is no such place.
    """
    place, n_places = -1 if body.id_slot is None else body.id_slot, front.facts.n_parallel
    if not -1 <= place < n_places:
        raise RequestError(400, f"id_slot is {place}", f"slots are 0 to {n_places - 1}")
    return place


async def grammar_for(front: Front, body: RequestFields) -> Grammar | None:
    """What the text of an answer has to be; None if it is free.

    Raises:
        RequestError: the request says so in several fields, or there is no grammar for a schema.
    """
    given = {name: getattr(body, name) for name in STRUCTURE}
    if (outputs := body.structured_outputs) is not None:
        if outputs.structural_tag or outputs.whitespace_pattern:
            raise unsupported(
                "structured_outputs: structural_tag or whitespace_pattern", "use tools or a grammar"
            )
        for name, value in msgspec.structs.asdict(outputs).items():
            given[f"structured_outputs.{name}"] = value
    return await front.apart(grammar_of, given)


async def text_fields(front: Front, body: RequestFields) -> dict[str, Any]:
    """Fields of a `Submit` that goes on from plain text.

    Raises:
        RequestError: as `grammar_for` and `place_of`.
    """
    return {
        "stop": stop_strings(body.stop),
        "grammar": await grammar_for(front, body),
        "reuses": body.reuses,
        "place": place_of(front, body),
    }
