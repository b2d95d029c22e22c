"""Write the tables of docs/benchmarks.md that stand beside llama.cpp's figures.

    python docs/make_speed_tables.py

The figures are in docs/cpu-speed*.json, a file for each machine, which
`benchmarks/cpu_vs_llama_cpp.py --tables --json` writes. Each table stands between two comments that
name it, beside the machine that it is from: the first of `FIGURES` that has it. Nothing stands
there where none has.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
FIGURES = [ROOT / "docs" / f"cpu-speed{name}.json" for name in ("", "-intel", "-zen5")]
sys.path[:0] = [str(ROOT / "benchmarks")]

from speed_report import Report  # noqa: E402
from speed_tables import TABLES  # noqa: E402


def with_tables(text: str) -> str:
    """The page with its tables made anew."""
    reports = [Report.read(path) for path in FIGURES]
    parts = {}
    for name in TABLES:
        report = next((one for one in reports if one.tables(name)), None)
        parts[name] = f"\n{report.about()}\n\n{report.tables(name)}\n" if report else ""
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise SystemExit(f"{PAGE}: no {begin.strip()} with {end}")
        text = f"{before}{begin}{part}{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
