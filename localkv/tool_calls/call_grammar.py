"""Grammars that calls of tools have to keep to, in the syntax of a model's family."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from localkv.errors import UsageError
from localkv.structured.grammar import Grammar
from localkv.tool_calls.family import CallRules, Family, Term, quoted
from localkv.tool_calls.tools import JSON_TYPES, Tool, Tools

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
    "auto" text is free up to a mark, and a call after it keeps to the grammar. Where there is no
    mark, or no grammar for a tool's arguments, calls are as free as text.

    Args:
        answer: what an answer without calls keeps to. Then it is calls or such a text, nothing
            else.

    Returns:
        None if nothing is to be kept to.

    Calls of a tool whose schema has no grammar keep to what is left of it, or to any object, and
    `tools.warnings` says so. Other tools keep their grammars.

    Raises:
        UsageError: the arguments of a `strict` tool have no grammar, or the family can't have calls
            and a grammar of answers. It is raised, too, if all of it together is too much, and a
            call is required or there is a grammar of answers.
    """
    if not tools:
        return answer

    def term(text: str) -> str:
        token = vocabulary.token_to_id(text)
        is_marker = token is not None and vocabulary.is_marker(token)
        return f"<[{token}]>" if is_marker else quoted(text)

    try:
        return _grammar(family.rules(list(tools), term), tools, term, answer)
    except UsageError:
        usable = [_usable(one, family, tools, term) for one in tools]
        if all(one is two for one, two in zip(tools, usable, strict=True)):
            if tools.choice == "auto" and answer is None:
                return None
            raise
        return _grammar(family.rules(usable, term), tools, term, answer)


def _grammar(rules: CallRules, tools: Tools, term: Term, answer: Grammar | None) -> Grammar | None:
    if tools.choice == "auto":
        if answer is None:
            if not rules.mark or rules.before:
                tools.warnings += [
                    f"strict of the tool {tool.name!r} has no effect unless a call is required: "
                    "this model's calls have no mark of their own"
                    for tool in tools
                    if tool.strict
                ]
                return None
            return replace(Grammar.lark(_lark(rules.one, rules), _WHAT), after=rules.mark)
        if rules.before:
            raise UsageError(
                "this model's calls are in channels: its answers can't have a grammar, too",
                hint='set tool_choice to "none" or "required"',
            )
    body = rules.many if tools.parallel else rules.one
    mark = rules.mark_term or (term(rules.mark) if rules.mark else "")
    grammar = Grammar.lark(_lark(f"{rules.before} {mark} {body}", rules), _WHAT)
    if tools.choice == "auto" and answer is not None:
        return Grammar.either(answer, grammar)
    return replace(grammar, is_all=bool(rules.before))


def _usable(tool: Tool, family: Family, tools: Tools, term: Term) -> Tool:
    """A tool, with the part of its schema that has a grammar; `tools.warnings` names the rest.

    Raises:
        UsageError: it is strict, and some of it has no grammar.
    """

    def refusal(one: Tool) -> UsageError | None:
        try:
            rules = family.rules([one], term)
            Grammar.lark(_lark(rules.one, rules), f"schema of the tool {one.name!r}")
        except UsageError as error:
            return error
        return None

    error = refusal(tool)
    if error is None:
        return tool
    if tool.strict:
        raise error
    left = {key: _loosened(tool, key) for key in tool.properties}
    kept = {key: value for key, value in tool.parameters.items() if key in _KEPT}
    found = replace(tool, parameters={**kept, "type": "object", "properties": left})
    free = [key for key, value in left.items() if value is not tool.properties[key]]
    what = f"its arguments {', '.join(free)} may be anything"
    if not free:
        what = "only what it says of each argument holds"
    if not left or refusal(found) is not None:
        found, what = replace(tool, parameters={"type": "object"}), "its arguments may be anything"
    tools.warnings.append(f"{error.message}: {what}")
    return found


_KEPT = ("required", "$defs", "definitions")


def _loosened(tool: Tool, key: str) -> object:
    """The schema of an argument, or its type alone if the rest has no grammar."""
    schema = tool.properties[key]
    try:
        root = {"type": "object", "properties": {key: schema}, "required": [key]}
        Grammar.json_schema({**{k: v for k, v in tool.parameters.items() if k in _KEPT}, **root})
    except UsageError:
        types = tool.types_of(key)
        return {"type": sorted(types)} if types and types <= JSON_TYPES else {}
    return schema


def _lark(start: str, rules: CallRules) -> str:
    return "\n".join(["%llguidance {}", f"start: {start}", *rules.rules, ""])
