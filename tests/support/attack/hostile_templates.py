"""Chat templates that want all the time or memory there is, or are just odd.

`CASES` are written by hand, one for each way to ask for too much. `random_template` makes more, of
a grammar of what templates are made of: literals, huge numbers, filters, methods, loops, macros.
"""

from __future__ import annotations

import random

TIME = r"takes more than [0-9.]+ s\b"
MEMORY = "takes more than 1.00 GiB of memory"
LENGTH = "makes more than .* characters"
FAILS = "the chat template fails: "
MALFORMED = "the chat template is malformed: "
TOO_LONG = "the chat template has .* characters; at most 1,048,576 are allowed"
ENDED = "ended the process that renders it"

DOUBLED = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x "
# each list holds the one before twice: sixty deep that is 2 ** 60 items to compare, print or hash
NESTED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}"
NESTED += "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"

CASES: dict[str, tuple[str, str]] = {
    # sizes
    "repeated text": ("{{ 'a' * 10**10 }}", MEMORY),
    "repeated text, measured": ("{{ ('a' * 10**10) | length }}", MEMORY),
    "repeated text that fits": ("{{ 'a' * 10**8 }}", LENGTH),
    "repeated list": ("{{ ([0] * 10**10) | length }}", MEMORY),
    "repeated tuple": ("{{ ((0,) * 10**10) | length }}", MEMORY),
    "repeated message": ("{{ messages[0].content * 10**9 }}", MEMORY),
    "repeated by a method": ("{{ 'a'.__mul__(10**9) }}", FAILS),
    "center": ("{{ 'a'.center(10**10) }}", MEMORY),
    "center filter": ("{{ 'a' | center(10**10) }}", MEMORY),
    "ljust": ("{{ 'a'.ljust(10**10) }}", MEMORY),
    "rjust": ("{{ 'a'.rjust(10**10) }}", MEMORY),
    "zfill": ("{{ 'a'.zfill(10**10) }}", MEMORY),
    "expandtabs": ("{{ '\t'.expandtabs(10**9 * 2) }}", MEMORY),
    "percent width": ("{{ '%1000000000d' % 1 }}", f"{MEMORY}|{LENGTH}"),
    "percent star": ("{{ '%*d' % (10**9 * 2, 1) }}", MEMORY),
    "percent precision": ("{{ '%.1000000000f' % 1 }}", f"{MEMORY}|{FAILS}"),
    "format width": ("{{ '{:1000000000}'.format(1) }}", MEMORY),
    "format nested width": ("{{ '{:{}}'.format(1, 10**10) }}", f"{MEMORY}|{FAILS}"),
    "format_map": ("{{ '{a:9999999999}'.format_map({'a': 1}) }}", MEMORY),
    "format filter": ("{{ '%2000000000s' | format('a') }}", MEMORY),
    "format attributes": ("{{ '{0.__class__.__mro__}'.format(1) }}", FAILS),
    "format items": ("{{ '{0[a][b]}'.format({'a': {'b': 1}}) }}", ""),
    "strftime": ("{{ strftime_now('%Y' * 10**8) }}", f"{MEMORY}|{LENGTH}|{FAILS}"),
    "strftime width": ("{{ strftime_now('%1000000000Y') }}", f"^$|{MEMORY}|{LENGTH}|{FAILS}"),
    "tojson indent": ("{{ [[1]] | tojson(indent=10**10) }}", f"{MEMORY}|{FAILS}"),
    "indent filter": ("{{ 'a\nb' | indent(10**10) }}", MEMORY),
    "indent of many lines": ("{{ ('a\n' * 10**6) | indent(10**4) }}", f"{MEMORY}|{LENGTH}"),
    "wordwrap": ("{{ ('a ' * 10**6) | wordwrap(1, wrapstring='b' * 10**6) }}", MEMORY),
    "replace": ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", MEMORY),
    "replace nothing": ("{{ ('a' * 10**6).replace('', 'b' * 10**6) }}", MEMORY),
    "join": ("{{ range(100000) | join('b' * 10**6) }}", MEMORY),
    "join method": ("{{ ('b' * 10**6).join(['a'] * 10**5) }}", MEMORY),
    "batch": ("{% for x in [1] | batch(10**10, 0) %}{{ x | length }}{% endfor %}", MEMORY),
    "slice": ("{{ [1] | slice(10**10) | list | length }}", MEMORY),
    "encode": ("{{ ('a' * 10**9).encode('utf-32') | length }}", MEMORY),
    "bytes of a number": ("{{ (1).to_bytes(10**10, 'big') | length }}", MEMORY),
    "translate": ("{{ ('a' * 10**6).translate({97: 'b' * 10**6}) | length }}", MEMORY),
    "maketrans": ("{{ ''.maketrans('a' * 10**8, 'b' * 10**8) | length }}", f"{MEMORY}|^$"),
    "urlencode": ("{{ ('é' * 10**8) | urlencode | length }}", MEMORY),
    "escape": ("{{ ('<' * 10**9) | e | length }}", MEMORY),
    "truncate": ("{{ 'a' | truncate(10**10, True, 'b' * 10**10) }}", MEMORY),
    "filesizeformat": ("{{ (10**400) | filesizeformat }}", FAILS),
    "xmlattr": ("{{ {'a': 'b' * 10**9} | xmlattr }}", MEMORY),
    "list of text": ("{{ ('a' * 3 * 10**8) | list | length }}", MEMORY),
    "literal": ("{{ '" + "a" * 10**5 + "' * 10**5 }}", MEMORY),
    "lipsum": ("{{ lipsum(n=10**9) }}", f"{MEMORY}|{FAILS}"),
    "lipsum words": ("{{ lipsum(1, False, 10**9, 10**9 + 1) }}", f"{MEMORY}|{FAILS}"),
    # numbers
    "tower": ("{{ 10**(10**10) }}", MEMORY),
    "tower of a variable": ("{% set x = 9 %}{{ x ** (x ** (x ** x)) }}", MEMORY),
    "tower that is not used": ("{{ 7 if 10**(10**10) else 8 }}", MEMORY),
    "digits": ("{{ 10**5000 }}", MALFORMED),
    "digits by percent": ("{{ '%d' % 10**5000 }}{{ '%x' % (10**(10**7)) }}", MALFORMED),
    "squares": (DOUBLED.replace("'a'", "3") + "* ns.x %}{% endfor %}", MEMORY),
    "int filter": ("{{ ('9' * 10**7) | int(0, 36) }}", f"{FAILS}|^$"),
    "round": ("{{ 1.5 | round(-10**9) }}", f"{FAILS}|^$"),
    "round of a number": ("{{ 5 | round(10**10) }}", "^$"),
    # time
    "range": ("{{ range(10**10) }}", FAILS),
    "nested ranges": ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, TIME),
    "nested ranges that write": (
        "{% for i in range(99999) %}" * 2 + "a" * 99 + "{% endfor %}" * 2,
        f"{LENGTH}",
    ),
    "sum": ("{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}", TIME),
    "sorts": ("{% for i in range(99999) %}{% set x = range(99999) | sort %}{% endfor %}", TIME),
    "groups": ("{{ range(99999) | groupby('real') | groupby('grouper') | list | length }}", "^$"),
    "map": ("{{ range(99999) | map('string') | map('center', 10**5) | list | length }}", MEMORY),
    "unique": ("{{ (range(99999) | list * 99) | unique | list | length }}", "^$"),
    "search": ("{{ ('a' * 10**7).count('a' * 5000 + 'b') }}" * 99, "^$"),
    "comparisons": (NESTED + "{{ ns.x == ns.y }}", TIME),
    "membership": (NESTED + "{{ ns.x in [ns.y] }}", TIME),
    "hash": (NESTED.replace("[", "(").replace("]", ",)") + "{{ {ns.x: 1}[ns.y] }}", TIME),
    "printing": (NESTED + "{{ ns.x }}", MEMORY),
    "printing in JSON": (NESTED + "{{ ns.x | tojson }}", MEMORY),
    "printing by pprint": (NESTED + "{{ ns.x | pprint }}", MEMORY),
    "printing in an error": (NESTED + "{{ {}[ns.x].a }}", FAILS),
    "striptags": ("{{ ('<' * 10**6) | striptags }}", f"^$|{LENGTH}"),
    "urlize": ("{{ ('http://' * 10**5) | urlize | length }}", "^$"),
    "wordcount": ("{{ ('a ' * 10**8) | wordcount }}", f"{MEMORY}|^$"),
    # growth step by step
    "doubled by ~": (DOUBLED + "~ ns.x %}{% endfor %}{{ ns.x }}", MEMORY),
    "doubled by +": (DOUBLED + "+ ns.x %}{% endfor %}", MEMORY),
    "doubled by a format": (
        DOUBLED.replace("= ns.x ", "= '{0}{0}'.format(ns.x) ") + "%}{% endfor %}",
        MEMORY,
    ),
    "doubled in a list": (DOUBLED.replace("'a'", "[1]") + "+ ns.x %}{% endfor %}", MEMORY),
    "doubled by a block": (
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        MEMORY,
    ),
    "cycler": ("{% set c = cycler(*range(99999)) %}" + "{{ c.next() }}" * 99, "^$"),
    "joiner": ("{% set j = joiner('a' * 10**9) %}{{ j() }}{{ j() }}", MEMORY),
    # recursion
    "macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", FAILS),
    "macros that double": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(90) }}",
        TIME,
    ),
    "caller": (
        "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
        FAILS,
    ),
    "loop": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", FAILS),
    "loops that double": (
        "{% for n in [90] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}",
        TIME,
    ),
    # the program itself
    "long": ("a" * 10**7, TOO_LONG),
    "nested parentheses": ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", MALFORMED),
    "nested lists": ("{{ " + "[" * 3000 + "]" * 3000 + " }}", f"{MALFORMED}|{ENDED}|{MEMORY}"),
    "nested ifs": ("{% if 1 %}" * 5000 + "{% endif %}" * 5000, f"{MALFORMED}|{ENDED}|{MEMORY}"),
    "nested ifs that Python knows": ("{% if 1 %}" * 90 + "{% endif %}" * 90, f"{MALFORMED}|^$"),
    "nested loops": ("{% for i in [1] %}" * 50 + "{% endfor %}" * 50, f"{MALFORMED}|^$"),
    "many nots": ("{{ " + "not " * 100_000 + "1 }}", f"{MALFORMED}|{ENDED}|{MEMORY}"),
    "many additions": ("{{ 1" + " + 1" * 100_000 + " }}", f"{MALFORMED}|{ENDED}|{MEMORY}"),
    "many concatenations": ("{{ 1" + " ~ 1" * 100_000 + " }}", f"{MALFORMED}|^$"),
    "many attributes": ("{{ a" + ".b" * 100_000 + " }}", f"{MALFORMED}|{ENDED}|{MEMORY}"),
    "many filters": ("{{ 1" + " | abs" * 100_000 + " }}", f"{MALFORMED}|{ENDED}|{MEMORY}"),
    "many tags": ("{{1}}" * 200_000, f"^$|{MEMORY}"),
    "unending comment": ("{#" * 400_000, MALFORMED),
    "unending braces": ("{{" * 400_000, MALFORMED),
    "long number": ("{{ " + "9" * 10**6 + " }}", f"{MALFORMED}"),
    "folded while compiling": ("{{ ['a' * 10**10, 10**(10**10)] | length }}", MEMORY),
    "folded and not reached": ("{% if false %}{{ 'a' * 10**10 }}{% endif %}", f"^$|{MEMORY}"),
    "folded by a filter": ("{% if false %}{{ 'a' | center(10**10) }}{% endif %}", f"^$|{MEMORY}"),
    "include": ("{% include '/etc/passwd' %}", FAILS),
    "import": ("{% import 'os' as os %}{{ os }}", FAILS),
    "extends itself": ("{% extends self %}", FAILS),
    "debug": ("{% debug %}", MALFORMED),
    # what errors say
    "long refusal": ("{{ raise_exception('a' * 10**8) }}", "refuses the conversation: a{300} ..."),
    "lines in a refusal": ("{{ raise_exception('a\n\r\nb') }}", "conversation: a b$"),
    "long name": ("{{ " + "a" * 10**5 + ".b }}", FAILS),
}
"""Name -> the template, and what is said of it, "^$" where it is rendered. On a busy machine any
may take too much time instead."""


_HUGE = ("10**9", "10**10", "2**31", "2**63", "99999", "10**(10**10)", "-1", "0", "1", "3", "1e308")
_TEXTS = ("'a'", "''", "'a b\nc' ", "'%s%d'", "'{}{:9}'", "'\t'", "'<b>'", "'\\u202e\\x1b[31m'")
_FILTERS = (
    *("abs", "attr('real')", "batch(N)", "batch(N, T)", "capitalize", "center(N)", "count"),
    *("default(E)", "dictsort", "e", "escape", "filesizeformat", "first", "float", "forceescape"),
    *("format(E)", "format(E, E)", "groupby(T)", "groupby('real')", "indent(N)", "indent(T, True)"),
    *("int", "int(N)", "items", "join", "join(T)", "join(E)", "last", "length", "list", "lower"),
    *("map('string')", "map('center', N)", "map(attribute=T)", "max", "min", "pprint", "random"),
    *("reject", "rejectattr(T)", "replace(T, E)", "replace('a', T, N)", "reverse", "round(N)"),
    *("safe", "select", "select('divisibleby', N)", "slice(N)", "slice(N, T)", "sort", "string"),
    *("striptags", "sum", "sum(start=E)", "title", "tojson", "tojson(indent=N)", "trim", "trim(T)"),
    *("truncate(N)", "truncate(N, True, T)", "unique", "upper", "urlencode", "urlize", "urlize(N)"),
    *("wordcount", "wordwrap(N)", "wordwrap(N, True, T)", "xmlattr", "tojson(sort_keys=E)"),
)
_METHODS = (
    *("center(N)", "ljust(N)", "rjust(N, 'b')", "zfill(N)", "expandtabs(N)", "format(E, E)"),
    *("join(E)", "join([E, T] * N)", "replace(T, E)", "replace('', T)", "replace(T, T, N)"),
    *("split(T)", "rsplit(T, N)", "splitlines()", "partition(T)", "encode('utf-32')", "strip(T)"),
    *("title()", "upper()", "swapcase()", "casefold()", "translate({97: T})", "count(T)"),
    *("find(T, N)", "startswith(T)", "index(T)", "append(E)", "get(E)", "keys()", "values()"),
    *("items()", "copy()", "bit_length()", "to_bytes(N, 'big')", "conjugate()", "hex()"),
    *("__class__", "__init__.__globals__", "mro()", "next()", "format_map({'a': E})", "real"),
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "==", "<", "in", "not in")


def random_template(seed: int) -> str:
    """A template of the grammar: mostly valid, and often after more than there is."""
    rng = random.Random(seed)
    known = "{% set x = 'x' %}{% set ns = namespace(x=[3]) %}{% macro f(x) %}{{ x }}{% endmacro %}"
    known += "{% macro g() %}{{ caller(3) }}{% endmacro %}"
    return known + "".join(_statement(rng, 2) for _ in range(rng.randint(1, 3)))


def _number(rng: random.Random) -> str:
    return rng.choice(_HUGE) if rng.random() < 0.4 else str(rng.randrange(9))


def _filled(pattern: str, rng: random.Random, depth: int) -> str:
    """`pattern` with expressions for E, numbers for N and texts for T."""
    makers = {
        "E": lambda: _expression(rng, depth - 1),
        "N": lambda: _number(rng),
        "T": lambda: rng.choice(_TEXTS) + rng.choice(("", "", "", f" * {_number(rng)}")),
    }
    words: list[str] = []
    for i, c in enumerate(pattern):
        before, after = pattern[i - 1 : i], pattern[i + 1 : i + 2]
        alone = not (before.isalnum() or after.isalnum() or "'" in (before, after))
        words.append(makers[c]() if c in makers and alone else c)
    return "".join(words)


def _expression(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        leaves = ("messages", "messages[0].content", "x", "ns.x", "tools", "none", "range(9)")
        return rng.choice((_number(rng), _number(rng), *_TEXTS, *_TEXTS, *leaves, "range(99999)"))
    kind = rng.randrange(8)
    pattern = {
        0: f"(E {rng.choice(_OPERATORS)} E)",
        1: f"(E | {rng.choice(_FILTERS)})",
        2: f"(E).{rng.choice(_METHODS)}",
        3: "[E, E]",
        4: "{T: E}",
        5: "(E)[E]",
        6: "(E if E else E)",
        7: rng.choice(("f(E)", "namespace(x=E)", "(E)[N:N]", "lipsum(N)", "dict(a=E)", "(E, E)")),
    }[kind]
    return _filled(pattern, rng, depth)


def _statement(rng: random.Random, depth: int) -> str:
    if depth <= 0:
        return _filled("{{ E }}", rng, 3)
    inner = _statement(rng, depth - 1)
    return _filled(
        rng.choice(
            (
                "{{ E }}",
                "{% set x = E %}",
                "{% set ns = namespace(x=E) %}",
                "{% for x in E %}" + inner + "{% endfor %}",
                "{% for x in range(N) %}" + inner + "{% endfor %}",
                "{% for x in [E, E] recursive %}" + inner + "{{ loop(E) }}{% endfor %}",
                "{% if E %}" + inner + "{% else %}" + inner + "{% endif %}",
                "{% macro f(x) %}"
                + inner
                + "{% if x %}{{ f(E) }}{% endif %}{% endmacro %}{{ f(E) }}",
                "{% set ns = namespace(x=T) %}{% for i in range(N) %}"
                "{% set ns.x = ns.x + ns.x %}" + inner + "{% endfor %}",
                "{% set x %}" + inner + "{% endset %}",
                "{% filter "
                + _filled(rng.choice(_FILTERS), rng, 1)
                + " %}"
                + inner
                + "{% endfilter %}",
                "{% call(y) g() %}" + inner + "{% endcall %}",
                "{% generation %}" + inner + "{% endgeneration %}",
            )
        ),
        rng,
        depth,
    )


def damaged(template: str, seed: int) -> str:
    """`template` with a few characters dropped, doubled or exchanged."""
    rng = random.Random(seed)
    text = list(template)
    for _ in range(rng.randint(1, 4)):
        if text:
            at = rng.randrange(len(text))
            text[at : at + 1] = rng.choice(
                ([], [text[at]] * 2, [rng.choice("{}%()[]'\"|.\0\ud800")])
            )
    return "".join(text)
