"""What `load` needs of an open checkpoint, whoever has written it.

Implemented by `saved_files`, `converted_files` and `imported_files`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from .rectangles import Rectangle
from .saved_tensors import Saved


class Reading(Protocol):
    """A read that was begun."""

    def finish(self, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type. Raises `CheckpointError` where a file is damaged."""


class LaterReading:
    """A read that only begins when it is finished."""

    def __init__(self, read: Callable[[torch.Tensor], None]) -> None:
        self._read = read

    def finish(self, into: torch.Tensor) -> None:
        """See `Reading.finish`."""
        self._read(into)


class CheckpointFiles(abc.ABC):
    """The tensors and settings of one checkpoint."""

    folder: Path
    """Its path, for messages."""
    checksum: int
    """By which ranks find out that they don't read the same one."""
    ranks: int
    """That have written it."""
    settings: dict[str, Any]
    """The `settings` of a manifest."""
    tensors: dict[str, Saved]
    """By key; of those that have no parts, shape and type."""

    @abc.abstractmethod
    def begin(self, key: str, start: int, numel: int) -> Reading:
        """Start to read `numel` elements of a tensor from number `start` on, in row-major order."""

    @abc.abstractmethod
    def read_rectangle(self, key: str, wanted: Rectangle) -> torch.Tensor:
        """Return a rectangle of a tensor, of that shape."""

    @abc.abstractmethod
    def check(self, key: str) -> None:
        """Read a tensor and compare its checksums, piece by piece. Raises `CheckpointError` where one differs."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files."""

    def read(self, key: str, start: int, into: torch.Tensor) -> None:
        """Fill a flat host tensor of the stored type with elements from number `start` on, in row-major order."""
        self.begin(key, start, into.numel()).finish(into)

    def whole(self, key: str) -> torch.Tensor:
        """Return a whole tensor."""
        tensor = self.tensors[key]
        return self.read_rectangle(key, Rectangle((0,) * len(tensor.shape), tensor.shape))
