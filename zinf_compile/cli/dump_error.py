"""The error of commands, and how errors of the user's own code become one."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from zinf_compile._torch import NEEDS_VALUES
from zinf_compile.errors import ZinfError

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Beginnings of the names of files that are PyTorch's, ours, or generated."""


class DumpError(ValueError):
    """The target of a command can't be found or run, or a file can't be written; the message says what is accepted."""


@contextlib.contextmanager
def raised_by(what: str) -> Iterator[None]:
    """Say of an error that it is the user's code that raised it, and where."""
    try:
        yield
    except (DumpError, ZinfError, *NEEDS_VALUES):
        raise
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_USERS)]
        where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        raise DumpError(f"{what} raised {type(error).__name__}: {error}{where}") from error
