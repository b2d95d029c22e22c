"""Write the fields of requests and their limits into docs: `python docs/make_limits.py`.

docs/server-operation.md has the table of limits, and docs/server-apis.md the numbers that say how
tokens are drawn.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from localkv.sampling.params import NUMBERS
from localkv.server.app import ENDPOINTS
from localkv.server.limits import table

DOCS = Path(__file__).parent


def pages() -> dict[Path, str]:
    """The pages with what these say now."""
    kinds = [endpoint.body_type for *_, endpoint in ENDPOINTS if hasattr(endpoint, "body_type")]
    limits = table(dict.fromkeys(kinds))
    names = (number.aliases[0] if number.aliases else name for name, number in NUMBERS.items())
    numbers = textwrap.wrap(", ".join(f"`{name}`" for name in names) + ".", 100)
    return {
        path: _with(path.read_text(), mark, lines)
        for path, mark, lines in (
            (DOCS / "server-operation.md", "limits", limits),
            (DOCS / "server-apis.md", "sampling", numbers),
        )
    }


def _with(text: str, mark: str, lines: list[str]) -> str:
    """A page with lines between its marks."""
    between = rf"(?<=<!-- {mark} -->\n).*?(?=<!-- end of {mark} -->)"
    return re.sub(between, lambda _: "\n".join(["", *lines, "", ""]), text, flags=re.DOTALL)


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
