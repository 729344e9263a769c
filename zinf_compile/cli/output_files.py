"""What commands write: files, tried before the work and written behind it without losing what is printed, and what they print."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from .dump_error import DumpError


def check_file(path: Path) -> None:
    """Raise `DumpError` for what can't be written as a file; nothing is left behind."""
    if not path.parent.is_dir():
        raise DumpError(f"{str(path)!r}: its folder does not exist; accepted: a file in one that does")
    if path.is_dir():
        raise DumpError(f"{str(path)!r} is a folder; accepted: a file in one")
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise DumpError(f"{str(path)!r} can't be written ({error.strerror}); accepted: a file that can") from error
    if not there:
        path.unlink()


def write_file(path: Path, text: str, options: argparse.Namespace) -> None:
    """Write a file, or say on standard error why it isn't, with 2 as the command's status."""
    try:
        path.write_text(text)
    except OSError as error:
        print(f"zinf: {str(path)!r} is not written ({error.strerror})", file=sys.stderr)
        options.status = 2


def print_output(text: str) -> None:
    """Print what a command found, unless its reader has gone. Raises `DumpError` where it can't be written."""
    try:
        print(text, flush=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            sys.stdout.close()  # what is left in its buffer would be an error again when the process ends
        if not isinstance(error, BrokenPipeError):  # `zinf dump ... | head`
            raise DumpError(f"the output is not written ({error.strerror}); accepted: a standard output that can be") from error
