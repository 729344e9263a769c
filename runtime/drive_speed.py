"""How fast several drives are beside each other, so that each gets the part of the bytes that it moves in the same time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from .aio import Engine
from .buffers import aligned_buffer
from .scratch_file import ScratchFile

_REQUEST_BYTES = 4 << 20
_REQUESTS = 16


def measure_shares(engine: Engine, folders: Sequence[str]) -> list[float]:
    """Write and read 64 MiB in each folder; return bytes per second of both together. A single folder is not measured."""
    return [_measure(engine, folder) for folder in folders] if len(folders) > 1 else [1.0]


def _measure(engine: Engine, folder: str) -> float:
    total = _REQUEST_BYTES * _REQUESTS
    parts = aligned_buffer(total).split(_REQUEST_BYTES)
    with closing(ScratchFile(folder)) as scratch:
        scratch.reserve(total)
        begin = time.perf_counter()
        for transfer in (engine.write, engine.read):
            requests = [transfer(scratch.file, number * _REQUEST_BYTES, part) for number, part in enumerate(parts)]
            for request in requests:
                request.wait()
        return 2 * total / (time.perf_counter() - begin)
