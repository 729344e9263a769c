"""Python's collector of cycles, seldom run while millions of small objects are made of which none is garbage yet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 100_000
"""New objects between two collections; a collection looks at all that are alive, and a large model's plan makes millions."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect cycles seldom inside; half of the time of planning Llama 405B goes into it otherwise."""
    before = gc.get_threshold()
    if not before[0]:  # the process has turned it off
        yield
        return
    gc.set_threshold(max(before[0], OBJECTS), before[1], before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
