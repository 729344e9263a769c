"""The speed of several drives beside each other, from which their shares of the bytes follow."""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from contextlib import closing

from zinf_compile.errors import StoreError
from zinf_compile.runtime.memory.aligned_buffers import aligned_buffer
from zinf_compile.runtime.system.filesystem import look_up

from .engine import Engine
from .scratch_file import ScratchFile

_REQUEST_BYTES = 4 << 20
_REQUESTS = 16


def measure_shares(engine: Engine, folders: Sequence[str]) -> list[float]:
    """Write and read up to 64 MiB on each filesystem; return bytes per second of both together, shared by its folders.

    A single filesystem is not measured: its folders get equal shares, whatever else the drive is doing. One without space to
    measure in counts as the slowest of the others.
    """
    found = [look_up(folder) for folder in folders]
    filesystems = [(f.mount_point, f.source) for f in found]
    folder_of = dict(zip(reversed(filesystems), reversed(folders), strict=True))
    if len(folder_of) == 1:
        return [1.0] * len(folders)
    speeds = {filesystem: _measure(engine, folder_of[filesystem]) for filesystem in dict.fromkeys(filesystems)}
    slowest = min((speed for speed in speeds.values() if speed is not None), default=1.0)
    return [(speeds[each] or slowest) / filesystems.count(each) for each in filesystems]


def _measure(engine: Engine, folder: str) -> float | None:
    found = look_up(folder)
    count = min(_REQUESTS, found.free_bytes // 2 // _REQUEST_BYTES) if found.total_bytes else _REQUESTS
    if not count:
        return None
    total = _REQUEST_BYTES * count
    parts = aligned_buffer(total).split(_REQUEST_BYTES)
    with closing(ScratchFile(folder)) as scratch:
        try:
            scratch.reserve(total)
        except StoreError as error:
            if error.errno == errno.ENOSPC:  # others took it meanwhile
                return None
            raise
        begin = time.perf_counter()
        for transfer in (engine.write, engine.read):
            requests = [transfer(scratch.file, number * _REQUEST_BYTES, part) for number, part in enumerate(parts)]
            for request in requests:
                request.wait()
        return 2 * total / (time.perf_counter() - begin)
