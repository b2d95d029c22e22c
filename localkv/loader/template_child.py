"""The child of `template_process`: `python -m localkv.loader.template_child`, which renders.

A template can ask for any time and memory, in one step of C code that no check in Python can
interrupt: `'a' * 10**10`, or comparing two lists that each hold the next one twice, sixty deep. So
its process may have `MAX_MEMORY` and no more, and its parent ends it when time is up.
"""

from __future__ import annotations

import marshal
from functools import lru_cache
from typing import Any

from localkv.errors import ChatTemplateError
from localkv.loader.template_program import TemplateProgram
from localkv.system.limited_child import run

MAX_MEMORY = 1 << 30
"""Bytes of address space: 40 MiB are Python and Jinja."""

_program = lru_cache(maxsize=4)(TemplateProgram)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The prompt's segments, or the error."""
    try:
        segments = _program(*request["template"]).render(
            marshal.loads(request["variables"]), request["max_chars"]
        )
    except ChatTemplateError as error:
        return {"error": error.message}
    return {"segments": segments}


if __name__ == "__main__":
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401

    run(answer, memory=MAX_MEMORY)
