"""Tables of the documentation, written by benchmarks from kept numbers.

A table stands between two marks on a page of docs/. The first one names the script and the files in benchmarks/results:

    <!-- benchmarks/step.py: step-1.json step-2.json -->
    <!-- end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end -->"

_TABLE = re.compile(rf"<!-- (benchmarks/\w+\.py):([^>]*) -->\n(.*?){END}", re.DOTALL)

Report = Callable[[dict[str, Any]], str]


class Table(NamedTuple):
    """A table between two marks of `page`."""

    page: Path
    script: str
    files: tuple[str, ...]
    text: str


def tables() -> list[Table]:
    """Return the tables of all pages."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [Table(page, m[1], tuple(m[2].split()), m[3]) for page in pages for m in _TABLE.finditer(page.read_text())]


def text_of(report: Report, names: Iterable[str]) -> str:
    """Return the text between the marks: one report for each of these files in benchmarks/results."""
    return "\n" + "\n\n".join(report(json.loads((RESULTS / name).read_text())) for name in names) + "\n\n"


def write(script: str, report: Report, files: Sequence[Path]) -> None:
    """Write the table of `script`, a path such as benchmarks/step.py, from these files; exit if no page has its marks."""
    odd = [str(path) for path in files if path.resolve().parent != RESULTS]
    if odd:
        raise SystemExit(f"{', '.join(odd)}: not in {RESULTS}; move what documentation shows there, and commit it")
    found = [table for table in tables() if table.script == script]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} tables on the pages of docs/ are marked <!-- {script}: ... --> ... {END}; accepted: one")
    names = [path.name for path in files]
    new = f"<!-- {script}: {' '.join(names)} -->\n{text_of(report, names)}{END}"
    page = found[0].page
    page.write_text(_TABLE.sub(lambda m: new if m[1] == script else m[0], page.read_text()))
