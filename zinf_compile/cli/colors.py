"""Colours for the text of a dump on a terminal."""

from __future__ import annotations

import os
import re
import sys

_STYLES = {
    "all_gather": "32", "gather_rows": "32",  # green: from ranks
    "reduce_scatter": "35",  # magenta: to ranks
    "swap_in": "36", "swap_out": "33",  # cyan: from a slower tier; yellow: to it
    "wait": "2", "release": "2",  # faint: nothing moves
    "region": "1",  # bold: compute
}  # fmt: skip
"""ANSI "select graphic rendition" codes by operator."""

_OPERATOR = re.compile(rf"^(?:(\w+) = )?({'|'.join(_STYLES)})\b(.*)$")
_COMMENT = re.compile(r"(#.*)$")


def colored(text: str) -> str:
    """Return a dump's text, coloured if the standard output is a terminal and `NO_COLOR` isn't set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    if sys.stdout is None or not sys.stdout.isatty():  # None where it was closed by the shell
        return text
    return "\n".join(map(_colored_line, text.split("\n")))


def _colored_line(line: str) -> str:
    body, comment = (line[: found.start()], found[1]) if (found := _COMMENT.search(line)) else (line, "")
    operator = _OPERATOR.match(body)
    if operator is not None:
        body = f"\x1b[{_STYLES[operator[2]]}m{body}\x1b[0m"
    return body + (f"\x1b[2m{comment}\x1b[0m" if comment else "")
