"""The prompts of plain completions: a text, token ids, both in turn, or several of these."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from localkv.server.failures import RequestError, context_error, unsupported
from localkv.server.front import Front
from localkv.server.limits import MOST_PROMPTS, Object, TextParts
from localkv.server.prompt_model import PromptModel

GivenPrompts: TypeAlias = str | TextParts | Object
"""The field `prompt`, as OpenAI's API and llama-server's take it."""


class TextPrompt(NamedTuple):
    """What a text goes on from.

    Attributes:
        ids: its tokens.
        text: the same as it was given, or without control tokens.
    """

    ids: list[int]
    text: str


async def text_prompts(front: Front, given: GivenPrompts) -> list[TextPrompt]:
    """The prompts of a request.

    Args:
        given: "text"; [1, 2]; [1, "text", 2]; {"prompt_string": "text"}; or a list of such, in
            which a number is never alone.

    Raises:
        RequestError: it is none of these, or a prompt is empty.
    """
    model = await front.model()
    many = _split(given)
    front.check_count(len(many))
    most = front.facts.engine.n_ctx
    return await front.apart(lambda: [_prompt(model, one, most) for one in many])


def _split(given: GivenPrompts) -> list[Any]:
    if not isinstance(given, list) or any(_is_token(item) for item in given):
        return [given]
    if not given:
        raise RequestError(400, "prompt is empty", "send a text, or token ids")
    if len(given) > MOST_PROMPTS:
        raise RequestError(400, f"prompt must be up to {MOST_PROMPTS} prompts, not {len(given)}")
    return given


def _is_token(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _prompt(model: PromptModel, given: object, most: int) -> TextPrompt:
    if isinstance(given, dict):
        given = _text_of(given)
    parts = given if isinstance(given, list) else [given]
    ids = list[int]()
    for number, part in enumerate(parts):
        if isinstance(part, str):
            special = number == 0
            ids += model.tokens(part, add_special=special, parse_special=True, most=most)
        elif _is_token(part):
            ids.append(checked_token(model, part))
        else:
            raise RequestError(
                400,
                f"prompt: {part!r:.60} is neither a text nor a token id",
                'as in "text", [1, 2] or ["one text", "another"]',
            )
        if len(ids) > most:
            raise context_error(len(ids), most, is_least=True)
    if not ids:
        raise RequestError(400, "the prompt has no tokens", "send a text, or token ids")
    text = given if isinstance(given, str) else model.tokenizer.decode(ids, skip_special=True)
    return TextPrompt(ids, text)


def checked_token(model: PromptModel, token: Any) -> int:
    """A token id.

    Raises:
        RequestError: the vocabulary has no such token.
    """
    n_vocab = model.tokenizer.n_vocab
    if not _is_token(token) or not 0 <= token < n_vocab:
        raise RequestError(
            400, f"{token!r:.40} is no token id", f"the vocabulary has 0 to {n_vocab - 1}"
        )
    checked: int = token
    return checked


def _text_of(part: dict[str, Any]) -> str:
    """The text of a prompt that is an object, as llama-server takes them."""
    if part.get("multimodal_data"):
        raise unsupported("multimodal_data", "this model reads text")
    text = part.get("prompt_string")
    if not isinstance(text, str):
        raise RequestError(400, "prompt: an object needs prompt_string, a text")
    return text
