"""The line of the README that says when the tests of tests/gpu last passed on a GPU."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PREFIX = "last run on a GPU:"


def line(reports: Mapping[str, Sequence[Any]], exitstatus: int, *, files: Iterable[Path], run: tuple[str, str]) -> str | None:
    """Return the line of a run, (commit, device); None unless each of these files was run, and every test of theirs passed.

    `reports`: pytest's, by outcome, as a terminal reporter has them.
    """
    passed = {Path(report.nodeid.split("::")[0]).name for report in reports.get("passed", ()) if "gpu" in report.keywords}
    others = [
        r for outcome in ("skipped", "xfailed", "xpassed", "error", "failed", "deselected") for r in reports.get(outcome, ())
    ]
    if exitstatus != 0 or not passed.issuperset(file.name for file in files) or any("gpu" in r.keywords for r in others):
        return None
    commit, device = run
    return f"{PREFIX} {commit}, {device}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def write(line: str, readme: Path) -> None:
    """Put the line in the place of the earlier one, or at the end."""
    text = readme.read_text()
    pattern = re.compile(rf"^{PREFIX}.*$", re.MULTILINE)
    readme.write_text(pattern.sub(line, text) if pattern.search(text) else f"{text.rstrip()}\n\n{line}\n")
