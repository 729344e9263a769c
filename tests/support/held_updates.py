"""Deferred steps whose thread stands still in their middle."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from zinf_compile.optim.chunk_step import ChunkStep

LONGEST_S = 60.0
"""After that it goes on by itself: a test that waits for it fails, and doesn't hang."""


@contextlib.contextmanager
def held_updates(after: int) -> Iterator[threading.Event]:
    """Context in which the thread that updates has still to report a chunk, after so many others, until the given event is set.

    The end of the context sets it.
    """
    gate, finish, done = threading.Event(), ChunkStep.finish, 0

    def held(chunk: ChunkStep, *args: Any) -> None:
        nonlocal done
        finish(chunk, *args)
        if threading.current_thread() is not threading.main_thread():
            if done == after:
                gate.wait(LONGEST_S)
            done += 1

    with mock.patch.object(ChunkStep, "finish", held):
        try:
            yield gate
        finally:
            gate.set()
