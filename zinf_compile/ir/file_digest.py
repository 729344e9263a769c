"""A file that ranks must read alike, as they compare it: by its content, since nodes may have it under other names."""

from __future__ import annotations

import os
from pathlib import Path

from .program import digest_of


def by_content(name: str | os.PathLike[str]) -> str:
    """Return a digest of the file's content; the name where there is no such file."""
    path = Path(name)
    return f"a file of digest {digest_of([path.read_bytes().hex()])}" if path.is_file() else os.fspath(name)
