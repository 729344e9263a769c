"""Saves whose own thread stands still: what is written meanwhile is written by who is about to change it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

from zinf_compile.checkpoint.saved_pieces import SavedPieces


@contextlib.contextmanager
def held_saves() -> Iterator[threading.Event]:
    """Context in which the threads of saves wait, before they write anything, for the event that it gives; its end sets it."""
    gate, write_rest = threading.Event(), SavedPieces.write_rest

    def held(pieces: SavedPieces) -> None:
        gate.wait()
        write_rest(pieces)

    with mock.patch.object(SavedPieces, "write_rest", held):
        try:
            yield gate
        finally:
            gate.set()
