"""What fails on one rank fails on all of them, rather than leave the others waiting for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zinf_compile.errors import RankMismatchError
from zinf_compile.runtime.context import Context


@contextlib.contextmanager
def together(context: Context, what: str) -> Iterator[None]:
    """Raise on all ranks what the block raises on one: there as it is, elsewhere `RankMismatchError`. Collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    ranks = [rank for rank, failed in enumerate(context.agree([what], what=what, value=float(error is not None))) if failed]
    if error is not None:
        raise error
    if ranks:
        raise RankMismatchError(f"{what} failed on rank {ranks[0]}, see there; the model is what it was")
