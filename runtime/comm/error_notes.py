"""Notes of errors that end one rank, for those that wait for it: in the store through which the process group was made.

A rank that raises alone does not come to the next exchange. The others would only learn that it doesn't answer.
"""

from __future__ import annotations

import contextlib
import json

import torch.distributed as dist

from zinf_compile._torch import store_of

_MOST_CHARACTERS = 1500


class ErrorNotes:
    """The last error of each rank, and how many exchanges of the group had ended when it was raised.

    A note counts as long as no exchange has ended since: else that rank has caught its error, and goes on.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self.exchanges = 0
        """Those that have ended on this rank."""

    def leave(self, error: BaseException) -> None:
        """Leave a note of this rank's error."""
        text = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS]
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store is where another rank was
            store = store_of(self._group)
            if store is not None:
                store.set(_key(self._rank), json.dumps([self.exchanges, text]))

    def read(self) -> str:
        """Return what the first of the other ranks has left, if it counts; else an empty text."""
        with contextlib.suppress(RuntimeError, dist.DistError):
            store = store_of(self._group)
            if store is None:
                return ""
            for rank in range(self._size):
                if rank != self._rank and store.check([_key(rank)]):
                    exchanges, text = json.loads(store.get(_key(rank)))
                    if exchanges == self.exchanges:
                        return f"rank {rank} stopped with {text}"
        return ""


def _key(rank: int) -> str:
    return f"zinf error of rank {rank}"
