"""Runs jobs in forked worker processes, for their effects on disk, such as filling Inductor's cache.

Called by `regions`; imports nothing of the package.
"""

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
"""Jobs of a worker process. They are inherited by the fork, since most can't be pickled."""


def run_forked(jobs: Sequence[Job], *, processes: int, timeout_s: float = 600.0) -> Iterator[int]:
    """Run the jobs in up to `processes` forked workers; yield each job's number once it has run.

    Results and errors of a job stay in its worker: callers read what it wrote to disk. Every number is yielded exactly once. If a
    worker dies, if no job ends within `timeout_s`, or if no worker can be forked, all workers are killed and the remaining
    numbers are yielded at the end.

    A worker has only the calling thread, so jobs must not take locks of other threads, compute on several threads, or use a GPU.
    """
    left = dict.fromkeys(range(len(jobs)))
    with _workers(jobs, processes) as running:
        while running and (done := wait(running, timeout_s, FIRST_COMPLETED).done):
            for future in done:
                number = running.pop(future)
                if future.exception() is None:
                    del left[number]
                    yield number
    yield from left


@contextlib.contextmanager
def _workers(jobs: Sequence[Job], processes: int) -> Iterator[dict[Future[None], int]]:
    """Context in which workers run the jobs; yields the jobs' numbers by future. Its exit kills the workers."""
    context, running, pool = _RecordingForkContext(), dict[Future[None], int](), None
    try:
        # out of memory, processes or semaphores; a daemon, which may not fork; a worker that died already
        with contextlib.suppress(OSError, NotImplementedError, AssertionError, BrokenProcessPool), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forking with threads; jobs use none
            size = max(1, min(processes, len(jobs)))
            pool = ProcessPoolExecutor(size, mp_context=context, initializer=_become_worker, initargs=(jobs,))
            for number in range(len(jobs)):
                running[pool.submit(_run, number)] = number
        yield running
    finally:
        for worker in context.made:
            if worker.pid is not None:
                worker.kill()  # SIGKILL, so that it flushes, closes and joins nothing of the parent
                worker.join()
        if pool is not None:
            pool.shutdown()


class _RecordingForkContext(ForkContext):
    """Fork context that records its processes: an executor itself can't kill a worker that hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ForkProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> ForkProcess:  # type: ignore[override]
        self.made.append(ForkProcess(*args, **kwargs))
        return self.made[-1]


def _become_worker(jobs: Sequence[Job]) -> None:
    global _jobs  # noqa: PLW0603
    _jobs = jobs
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.freeze()  # collecting the parent's objects would copy their pages
    torch.set_num_threads(1)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # returns only if the parent was killed: otherwise the parent kills its workers
    os._exit(1)


def _run(number: int) -> None:
    with contextlib.suppress(Exception):
        _jobs[number]()
