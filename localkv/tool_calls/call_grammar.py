"""Grammars that calls of tools have to keep to, in the syntax of a model's family."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from localkv.errors import UsageError
from localkv.structured.grammar import Grammar
from localkv.tool_calls.family import CallRules, Family, quoted
from localkv.tool_calls.tools import Tools

_WHAT = "grammar of the tools' calls"


class MarkVocabulary(Protocol):
    """A tokenizer as far as marks are concerned; `Tokenizer` is one."""

    def token_to_id(self, text: str) -> int | None: ...

    def is_marker(self, token: int) -> bool: ...


def call_grammar(
    family: Family, tools: Tools, vocabulary: MarkVocabulary, answer: Grammar | None = None
) -> Grammar | None:
    """What an answer that may call tools keeps to, as the grammar of a request.

    With "required", or the name of a tool, the answer is one call, or several if they may be. With
    "auto" text is free up to a mark, and a call after it keeps to the grammar; where there is
    no mark, or no grammar for a tool's arguments, calls are as free as text.

    Args:
        answer: what an answer without calls keeps to. Then it is calls or such a text, nothing
            else.

    Returns:
        None if nothing is to be kept to.

    Raises:
        UsageError: there is no grammar for a tool's arguments, and a call is required or there is
            one for answers; or the family can't have both.
    """
    if not tools:
        return answer

    def term(text: str) -> str:
        token = vocabulary.token_to_id(text)
        is_marker = token is not None and vocabulary.is_marker(token)
        return f"<[{token}]>" if is_marker else quoted(text)

    rules = family.rules(list(tools), term)
    if tools.choice == "auto":
        if answer is None:
            return _after_mark(rules)
        if rules.before:
            raise UsageError(
                "this model's calls are in channels: no grammar can be for its answers besides",
                hint='set tool_choice to "none" or "required"',
            )
    body = rules.many if tools.parallel else rules.one
    mark = rules.mark_term or (term(rules.mark) if rules.mark else "")
    grammar = Grammar.lark(_lark(f"{rules.before} {mark} {body}", rules), _WHAT)
    if tools.choice == "auto" and answer is not None:
        return Grammar.either(answer, grammar)
    return replace(grammar, is_all=bool(rules.before))


def _after_mark(rules: CallRules) -> Grammar | None:
    if not rules.mark or rules.before:
        return None
    try:
        grammar = Grammar.lark(_lark(rules.one, rules), _WHAT)
    except UsageError:
        return None
    return replace(grammar, after=rules.mark)


def _lark(start: str, rules: CallRules) -> str:
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.rules, ""])
