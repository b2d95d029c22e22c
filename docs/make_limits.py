"""Write the table of limits in docs/server-operation.md: `python docs/make_limits.py`."""

from __future__ import annotations

import re
from pathlib import Path

from localkv.server.app import ENDPOINTS
from localkv.server.limits import table

PAGE = Path(__file__).with_name("server-operation.md")
BETWEEN = re.compile(r"(?<=<!-- limits -->\n).*?(?=<!-- end of limits -->)", re.DOTALL)


def page() -> str:
    """The whole page, with the table as it is now."""
    kinds = [endpoint.body_type for *_, endpoint in ENDPOINTS if hasattr(endpoint, "body_type")]
    lines = table(dict.fromkeys(kinds))
    return BETWEEN.sub(lambda _: "\n".join(["", *lines, "", ""]), PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
