"""llama.cpp's grammars (GBNF) in llguidance's Lark, with the same texts in the language.

llguidance reads lexemes, the longest that there is: `[a-z]+ "x"` as two of them would never reach
its "x". So each character is a lexeme of its own here, and rules are never joined into one.
(GBNF: llama.cpp's `grammars/README.md`.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from localkv.errors import UsageError

if TYPE_CHECKING:
    from llguidance.gbnf_to_lark import ASTNode

_IS_GBNF = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|.", re.DOTALL)
_QUOTED = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"?|\[\^?(?:\\.|[^\]\\])*\]?', re.DOTALL)
"""Literals and classes, which have escapes, and comments, which have none."""
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.|.", re.DOTALL
)
_SET_OPERATORS = "&~"
"""Characters of a class that stand for themselves in GBNF, but not in llguidance."""
_ANY = r"[\s\S]"


def is_gbnf(text: str) -> bool:
    """Whether a grammar has a rule as GBNF writes it, and not as Lark does."""
    return _IS_GBNF.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """The grammar in llguidance's Lark.

    Raises:
        UsageError: it is malformed, lacks the rule `root`, or one that another names.
    """
    from llguidance.gbnf_to_lark import GrammarParser

    try:
        rules = GrammarParser().parse(_QUOTED.sub(_with_characters, text))
        names = {name: "start" if name == "root" else f"r{i}" for i, name in enumerate(rules)}
        if "root" not in names:
            raise UsageError("the grammar has no rule 'root'", hint="GBNF begins with it")
        return "".join(
            f"{names[name]}: {_in_lark(rule.alternatives, names)}\n" for name, rule in rules.items()
        )
    except UsageError:
        raise
    except RecursionError:
        raise UsageError("the grammar is nested too deeply") from None
    except Exception as error:  # of any type: the parser has some of its own, and IndexError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"the grammar can't be read: {reason}") from None


def _with_characters(quoted: re.Match[str]) -> str:
    """A literal or a class with characters in place of their numbers.

    Raises:
        UsageError: there is no such character.
    """
    text = quoted[0]
    if text.startswith("#"):
        return text
    is_class = text.startswith("[")

    def character(found: re.Match[str]) -> str:
        number = found[1] or found[2] or found[3]
        if number is None:
            is_operator = is_class and found[0] in _SET_OPERATORS
            return f"\\x{ord(found[0]):02x}" if is_operator else found[0]
        code = int(number, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise UsageError(f"the grammar names a character that does not exist: {found[0]}")
        return f"\\x{code:02x}" if code < 0x80 else chr(code)

    return _ESCAPE.sub(character, text)


def _in_lark(node: ASTNode, names: dict[str, str]) -> str:
    from llguidance import gbnf_to_lark as gbnf

    match node:
        case gbnf.LiteralNode():
            return " ".join(f'"{c}"' for c in _CHARACTER.findall(node.value)) or '""'
        case gbnf.RegexNode():
            return f"/{_ANY if node.rx == '.' else node.rx}/"
        case gbnf.RuleRefNode():
            if node.name not in names:
                raise UsageError(f"the grammar has no rule {node.name!r}, which another names")
            return names[node.name]
        case gbnf.RepetitionNode():
            most = "" if node.max_times is None else node.max_times
            times = {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get(
                (node.min_times, most), f"{{{node.min_times},{most}}}"
            )
            return f"({_in_lark(node.node, names)}){times}"
        case gbnf.SequenceNode():
            return " ".join(_in_lark(one, names) for one in node.nodes) or '""'
        case gbnf.AlternativeNode():
            return "(" + " | ".join(_in_lark(one, names) for one in node.alternatives) + ")"
    raise AssertionError(type(node))
