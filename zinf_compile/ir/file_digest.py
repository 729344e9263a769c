"""The name of a file that ranks must read alike, as they compare it: two nodes may have other files of one name."""

from __future__ import annotations

import os
from pathlib import Path

from .program import digest_of


def with_digest(name: str | os.PathLike[str]) -> str:
    """Return the name with a digest of the file's content; the name alone where there is no such file."""
    path = Path(name)
    return f"{os.fspath(name)} of digest {digest_of([path.read_bytes().hex()])}" if path.is_file() else os.fspath(name)
