"""Write the tables of docs/benchmarks.md that stand beside llama.cpp's figures.

    python docs/make_speed_tables.py

The figures are in docs/cpu-speed.json, which `benchmarks/cpu_vs_llama_cpp.py --tables` writes. Each
table stands between two comments that name it.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "cpu-speed.json"
sys.path[:0] = [str(ROOT / "benchmarks")]

from speed_report import Report  # noqa: E402
from speed_tables import TABLES  # noqa: E402


def with_tables(text: str) -> str:
    """The page with its tables made anew."""
    report = Report.read(FIGURES)
    parts = {"machine": report.about() + "\n"}
    parts |= {name: report.tables(name) for name in TABLES}
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise SystemExit(f"{PAGE}: no {begin.strip()} with {end}")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
