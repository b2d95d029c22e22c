"""Write the tables of speed beside other programs: in README.md and in docs/.

    python docs/make_speed_tables.py

The figures are in docs/cpu-speed.json, which `benchmarks/cpu_vs_llama_cpp.py --tables --json`
writes, all of one machine. Each table stands between two comments that name it; nothing stands
there where there are no figures. docs/benchmarks-tables.md has all tables. docs/benchmarks.md has
the usual types of weights, and like README.md no ranges.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, SHORT = ROOT / "docs" / "benchmarks-tables.md", ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
PAGES = (PAGE, SHORT, README)
FIGURES = ROOT / "docs" / "cpu-speed.json"
sys.path[:0] = [str(ROOT / "benchmarks")]

from speed_report import Report, markdown  # noqa: E402
from speed_tables import TABLES  # noqa: E402

DETAILS = ("to our f16", "of the memory")
"""Ends of the titles of columns that short tables leave out."""
IN_SHORT = ("depth", "published", "types", "experts", "sequences")
USUAL = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "MXFP4")
"""Weights in the short table of types."""


def in_short(table: str, weights: tuple[str, ...] = ()) -> str:
    """A table without details and ranges; with `weights`, only the rows that begin with these."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    kept = [i for i, title in enumerate(rows[0]) if not title.endswith(DETAILS)]
    head, _, *body = [[re.sub(r" \(.*\)", "", row[i]) for i in kept] for row in rows]
    return markdown(head, [row for row in body if not weights or row[0] in weights])


def short_tables(text: str, weights: tuple[str, ...] = ()) -> str:
    """All tables in short with their titles, but for the cost of 1,000 more tokens."""
    parts = re.findall(r"([^\n]+:)\n\n((?:\|[^\n]*\n)+)", text)
    return "\n".join(
        f"{title}\n\n{in_short(table, weights)}"
        for title, table in parts
        if not title.startswith("What 1,000")
    )


def parts(page: Path) -> dict[str, str]:
    """What stands between the comments of a page, by name."""
    report = Report.read(FIGURES)
    if page == README:
        table = report.tables("depth").partition("\n\n")[2].partition("\n\n")[0]
        return {"depth": f"\n{in_short(table)}\n"}
    if page == SHORT:
        return {
            name: f"\n{short_tables(report.tables(name), USUAL if name == 'types' else ())}\n"
            for name in IN_SHORT
        }
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
