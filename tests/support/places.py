"""The device on which twins and their batches are made: the CPU, where a test doesn't say otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_places = [torch.device("cpu")]


def place() -> torch.device:
    """Return it."""
    return _places[-1]


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    """Context in which it is another one."""
    _places.append(torch.device(device))
    try:
        yield
    finally:
        _places.pop()
