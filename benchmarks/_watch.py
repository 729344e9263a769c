"""Runs processes within a memory cap; the PSS of each and its children is sampled twenty times a second."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SECONDS = 0.05
"""Interval of the samples of memory."""

CACHED_SECONDS = 2.0
"""Interval of the samples of the page cache."""

OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "allocate memory", "BudgetError", "DefaultCPUAllocator", "Out of memory")
"""Error texts of processes that reach `RLIMIT_DATA`."""

DRIVE_FULL = ("cannot reserve space", "No space left on device", "Disk quota exceeded")


@dataclasses.dataclass
class Watched:
    """Result of a run."""

    lines: list[str]
    """Output lines of the first process."""
    peak_bytes: int = 0
    """Peak memory of one process and its children."""
    drive_bytes: int = 0
    """Peak size of the folder's files, unnamed ones included."""
    cached_bytes: int = 0
    """Peak size of their part in the page cache."""
    why: str = ""
    """Why it ended early; empty if it didn't."""


def watch(commands: Sequence[Sequence[str]], *, cap: int, folder: str, seconds: float) -> Watched:
    """Run commands at once until all have ended; kill them where one exceeds `cap` bytes with its children, or after `seconds`.

    Ends the program where one fails for another reason than memory.
    """
    found = Watched([])
    ends = time.monotonic() + seconds
    looked = 0.0
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * len(commands))]
        running = [
            subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
            for command, out, err in zip(commands, logs[::2], logs[1::2], strict=True)
        ]
        stack.callback(_kill, running)
        while any(process.poll() is None for process in running):
            for process in running:
                found.peak_bytes = max(found.peak_bytes, held := sum(map(_pss, _tree(process.pid))))
                if held > cap and not found.why:
                    found.why = f"held {held:,} bytes"
            if time.monotonic() > ends:
                found.why = f"took more than {seconds:.0f} s"
            if found.why or any(process.poll() for process in running):
                _kill(running)
            if time.monotonic() - looked > CACHED_SECONDS:
                looked = time.monotonic()
                on_drive, cached = _files(folder, running)
                found.drive_bytes, found.cached_bytes = max(found.drive_bytes, on_drive), max(found.cached_bytes, cached)
            time.sleep(SECONDS)
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read())
    found.lines = texts[0].splitlines()
    if not found.why and any(process.returncode for process in running):
        said = next(text for process, text in zip(running, texts[1::2], strict=True) if process.returncode)
        last = (said.strip().splitlines() or ["nothing"])[-1]
        if not any(word in said for word in (*OUT_OF_MEMORY, *DRIVE_FULL)):
            sys.exit(f"a process ended for another reason than memory; it said:\n{said[-4000:]}")
        found.why = last[:200]
    return found


def _kill(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _pss(pid: int) -> int:
    """Return the PSS of a process in bytes; 0 for one that has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


def _files(folder: str, running: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Return the bytes of all files in a folder that processes hold open, and how many of these are in the page cache."""
    seen: set[tuple[int, int]] = set()
    on_drive = cached = 0
    for pid in {pid for process in running for pid in _tree(process.pid)}:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    status = link.stat()
                    if not str(link.readlink()).startswith(folder) or (status.st_dev, status.st_ino) in seen:
                        continue
                    seen.add((status.st_dev, status.st_ino))
                    if status.st_size >= 1 << 20:  # not what compilers write
                        on_drive += status.st_blocks * 512
                        cached += _cached(link)
    return on_drive, cached


def _cached(path: Path) -> int:
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() or 0)
