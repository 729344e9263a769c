"""The pages that people read: README, CONTRIBUTING and docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from paths import ROOT

README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]
TEXTS = {path: path.read_text() for path in PAGES}


class Dump(NamedTuple):
    """A command `zinf ARGUMENTS` and the output that a page shows for it."""

    page: Path
    arguments: str
    shown: str


SHOWN = [Dump(page, *found) for page, text in TEXTS.items() for found in re.findall(r"```\n\$ zinf (.*)\n((?:.*\n)*?)```", text)]

COMMANDS = [(page, found) for page, text in TEXTS.items() for found in re.findall(r"`\.venv/bin/zinf (dump mlp.*?)`", text)]
"""Dumps of the smallest model that a page names and doesn't show."""


def anchors(path: Path) -> set[str]:
    """Return the ids of a page's headings, as Python-Markdown and GitHub make them from words, digits and hyphens."""
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def links(path: Path) -> list[str]:
    """Return the targets of a page's links and pictures, but for those into the web."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in found if not target.startswith(("http://", "https://"))]
