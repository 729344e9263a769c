"""Run jobs in forked copies of this process, for what they leave on disk."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import torch

Job = Callable[[], object]

_jobs: Sequence[Job] = ()
"""In a copy: what it may be asked to run. Jobs reach it by the fork, as most can't be pickled."""


def run_forked(jobs: Sequence[Job], *, processes: int, patience_s: float = 600.0) -> Iterator[int]:
    """Run the jobs in up to `processes` copies of this process; yield each job's number once a copy is through with it.

    A copy's memory is its own and its errors stay there: whoever needs a result looks for what the job wrote to disk. Every
    number is yielded exactly once. Where a copy dies, where none finishes a job for `patience_s`, or where copies can't be made,
    all copies are ended, and the numbers that are left come at the end.

    Only the calling thread lives on in a copy, so jobs may neither take locks of other threads nor compute on more than one
    thread nor touch a GPU.
    """
    left = dict.fromkeys(range(len(jobs)))
    with _copies(jobs, processes) as running:
        while running and (done := wait(running, patience_s, FIRST_COMPLETED).done):
            for future in done:
                number = running.pop(future)
                if future.exception() is None:
                    del left[number]
                    yield number
    yield from left


@contextlib.contextmanager
def _copies(jobs: Sequence[Job], processes: int) -> Iterator[dict[Future[None], int]]:
    """Context with copies that run the jobs, by what each job's end is told by. They end with it, whatever they do then."""
    context, running, pool = _Copying(), dict[Future[None], int](), None
    try:
        # no memory, process or semaphore left, a daemon that may have no children, or a copy that died already
        with contextlib.suppress(OSError, NotImplementedError, AssertionError, BrokenProcessPool), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads, which no job waits for
            size = max(1, min(processes, len(jobs)))
            pool = ProcessPoolExecutor(size, mp_context=context, initializer=_become_worker, initargs=(jobs,))
            for number in range(len(jobs)):
                running[pool.submit(_run, number)] = number
        yield running
    finally:
        for copy in context.made:
            if copy.pid is not None:
                copy.kill()  # not asked to end: nothing of the original's may be flushed, closed or joined there
                copy.join()
        if pool is not None:
            pool.shutdown()


class _Copying(ForkContext):
    """Forks for an executor, and knows what it forked: an executor itself can't end a copy that is stuck."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ForkProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> ForkProcess:  # type: ignore[override]
        self.made.append(ForkProcess(*args, **kwargs))
        return self.made[-1]


def _become_worker(jobs: Sequence[Job]) -> None:
    global _jobs  # noqa: PLW0603
    _jobs = jobs
    silence = os.open(os.devnull, os.O_RDWR)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    threading.Thread(target=_end_with_original, daemon=True).start()
    gc.freeze()  # what was there before is the original's: looking it through would copy its pages
    torch.set_num_threads(1)


def _end_with_original() -> None:
    original = multiprocessing.parent_process()
    assert original is not None
    original.join()  # its end only: it ends its copies itself, unless it is killed
    os._exit(1)


def _run(number: int) -> None:
    with contextlib.suppress(Exception):
        _jobs[number]()
