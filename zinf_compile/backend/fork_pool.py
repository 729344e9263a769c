"""Run jobs in forked copies of this process, for what they leave on disk."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

_RECORD = struct.Struct("=I")
_MOST_JOBS = 4096
"""What surely fits into a pipe that nobody reads yet."""

Job = Callable[[], object]


def run_forked(jobs: Sequence[Job], *, processes: int, patience_s: float = 600.0) -> Iterator[int]:
    """Run the jobs in up to `processes` copies of this process; yield each job's number once a copy is through with it.

    A copy's memory is its own and its errors stay there: whoever needs a result looks for what the job wrote to disk. Every
    number is yielded exactly once: those of a copy that died, or that said nothing for `patience_s`, at the end.

    Only the calling thread lives on in a copy, so jobs may neither take locks of other threads nor compute on more than one
    thread nor touch a GPU.
    """
    left = dict.fromkeys(range(len(jobs)))
    todo, done = os.pipe(), os.pipe()
    copies: list[int] = []
    try:
        os.write(todo[1], b"".join(_RECORD.pack(number) for number in list(left)[:_MOST_JOBS]))
        os.close(todo[1])
        with contextlib.suppress(OSError):  # no memory or no process left: as many copies as there are
            for _ in range(min(processes, len(jobs))):
                copies.append(_fork(jobs, todo[0], done))
        os.close(done[1])
        patient = select.poll()
        patient.register(done[0], select.POLLIN)
        while left and patient.poll(patience_s * 1000):
            record = os.read(done[0], _RECORD.size)
            if not record:
                break
            (number,) = _RECORD.unpack(record)
            del left[number]
            yield number
        yield from left
    finally:
        os.close(todo[0])
        os.close(done[0])
        for copy in copies:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another part of the program may have waited
                os.kill(copy, signal.SIGKILL)
                os.waitpid(copy, 0)


def _fork(jobs: Sequence[Job], todo: int, done: tuple[int, int]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads, which no job waits for
        copy = os.fork()
    if copy == 0:
        try:
            _work(jobs, todo, done)
        finally:
            os._exit(0)  # whatever was raised: nothing of the original's may be flushed, closed or joined here
    return copy


def _work(jobs: Sequence[Job], todo: int, done: tuple[int, int]) -> None:
    os.close(done[0])
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    gc.freeze()  # what was there before is the original's: looking it through would copy its pages
    torch.set_num_threads(1)
    while record := os.read(todo, _RECORD.size):
        (number,) = _RECORD.unpack(record)
        with contextlib.suppress(Exception):
            jobs[number]()
        os.write(done[1], record)
