"""Write the tables of docs/benchmarks.md and README.md that stand beside other programs' figures.

    python docs/make_speed_tables.py

The figures are in docs/cpu-speed.json, which `benchmarks/cpu_vs_llama_cpp.py --tables --json`
writes, all of one machine. Each table stands between two comments that name it; nothing stands
there where there are no figures. README has the table of depths, without ranges.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
PAGES = (PAGE, README)
FIGURES = ROOT / "docs" / "cpu-speed.json"
sys.path[:0] = [str(ROOT / "benchmarks")]

from speed_report import Report, markdown  # noqa: E402
from speed_tables import TABLES  # noqa: E402

DETAILS = ("to our f16", "of the memory")
"""Ends of the titles of columns that README leaves out."""


def in_short(tables: str) -> str:
    """The first of some tables, without details and ranges."""
    lines = tables.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    kept = [i for i, title in enumerate(rows[0]) if not title.endswith(DETAILS)]
    head, _, *body = [[re.sub(r" \(.*\)", "", row[i]) for i in kept] for row in rows]
    return markdown(head, body)


def parts(page: Path) -> dict[str, str]:
    """What stands between the comments of a page, by name."""
    report = Report.read(FIGURES)
    if page == README:
        return {"depth": f"\n{in_short(report.tables('depth'))}\n"}
    tables = {name: report.tables(name) for name in TABLES}
    return {
        name: f"\n{report.about()}\n\n{table}\n" if table else "" for name, table in tables.items()
    }


def with_tables(page: Path) -> str:
    """The text of a page with today's tables."""
    text = page.read_text()
    for name, part in parts(page).items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise SystemExit(f"{page}: no {begin.strip()} with {end}")
        text = f"{before}{begin}{part}{end}{after}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page))
