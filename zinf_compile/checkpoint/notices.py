"""Lines that a user is to see once, whether or not the program has set up logging."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("zinf_compile")


def notify(text: str) -> None:
    """Log a line at INFO; where nobody listens to this logger, as in a plain script, write it to stderr.

    By itself Python writes only warnings there. A handler on the logger, or on the root, decides what becomes of the line.
    """
    if _log.hasHandlers():
        _log.info("%s", text)
    else:
        print(f"zinf_compile: {text}", file=sys.stderr, flush=True)
