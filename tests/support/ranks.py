"""Run a function on several real ranks: processes joined by gloo, kept from one case to the next.

There is one pool of workers for each process of tests, and one more where ranks are on the device for tests. A case is a
function that all ranks call, over a process group of its own; between cases a worker lets go of all that the product made
(`zinf_compile.reset`) and puts back what a case may have changed of the process. A worker that fails, dies or gives no answer
ends the pool; the next case makes another.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from forking import start_forked
from rank_worker import Case, run_once, work

TIMEOUT_S = 240


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, alone: bool = False, afresh: bool = False, backend: str = "gloo"
) -> list[Any]:
    """Call `function(rank, world_size, *args)` on each of `world_size` ranks; return the results in rank order.

    `function` must be importable by name from a module under tests/ (a helper module, not a test file). An exception on any
    rank is raised here with that rank's traceback.

    `alone`: in processes of their own, which end with it: for what measures a process's memory, or leaves ranks out of step.
    `afresh`: these have not even the libraries at first, of which the kernel counts those of a forked process differently.
    `backend`: of the process group; "late" for ranks on the device of tests/device, which imports it.
    """
    if alone or afresh:
        with contextlib.closing(Pool(afresh=afresh, once=True, backend=backend)) as own:
            return own.run(function, world_size, args)
    return _pools[backend].run(function, world_size, args)


def run_at_once(function: Callable[..., Any], world_size: int, each: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Call it with each of several lists of arguments, all at the same time: for ranks that mostly wait.

    Each has ranks of its own, as with `alone` of `run_ranks`. Returns the results of each, in rank order.
    """
    with contextlib.ExitStack() as ended:
        pools = [ended.enter_context(contextlib.closing(Pool(once=True))) for _ in each]
        for pool, args in zip(pools, each, strict=True):
            pool.begin(function, world_size, args)
        return [pool.finish() for pool in pools]


@dataclasses.dataclass
class _Worker:
    process: Any
    connection: Connection
    ready: bool = True
    """The case before is cleared away."""


class Pool:
    """Processes that wait for cases; made when they are first needed, as many as the largest case took."""

    def __init__(self, *, afresh: bool = False, once: bool = False, timeout_s: float = TIMEOUT_S, backend: str = "gloo") -> None:
        self._afresh = afresh
        self._main = run_once if once else work
        self._timeout_s = timeout_s
        self._backend = backend
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Of the file by which the ranks of a case find each other."""
        self._size = 0
        """Ranks of the case that has begun."""

    @property
    def process_ids(self) -> list[int]:
        """Those of the workers, by rank."""
        return [worker.process.pid for worker in self._workers]

    def run(self, function: Callable[..., Any], size: int, args: Sequence[Any]) -> list[Any]:
        """Run one case; see `run_ranks`."""
        self.begin(function, size, args)
        return self.finish()

    def begin(self, function: Callable[..., Any], size: int, args: Sequence[Any]) -> None:
        """Let the ranks begin a case, of which `finish` returns the results."""
        try:
            if not all(self._is_ready(worker) for worker in self._workers):
                self.close()
            self._folder, self._size = tempfile.TemporaryDirectory(), size
            rendezvous = str(Path(self._folder.name) / "rendezvous")
            self._send(Case(function, size, tuple(args), rendezvous, self._timeout_s, self._backend))
        except BaseException:
            self.close()
            raise

    def finish(self) -> list[Any]:
        """Wait for the ranks; return the results of the case that has begun."""
        try:
            results = self._results()
        except BaseException:  # an interrupt and a test's own time-out, too: ranks may wait for each other
            self.close()
            raise
        self._forget_folder()
        return results

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _send(self, case: Case) -> None:
        while len(self._workers) < case.size:
            self._start()
        for rank, worker in enumerate(self._workers[: case.size]):
            worker.ready = False
            with contextlib.suppress(BrokenPipeError):  # it died since: told below
                worker.connection.send((case, rank))

    def _results(self) -> list[Any]:
        workers = self._workers[: self._size]
        deadline = time.monotonic() + self._timeout_s
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while missing := [rank for rank in range(self._size) if rank not in values and rank not in failures]:
            ranks = {workers[rank].connection: rank for rank in missing}
            answered = wait(list(ranks), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                failures[missing[0]] = f"ranks {missing} gave no answer within {self._timeout_s} s"
                break
            for connection in answered:
                assert isinstance(connection, Connection)
                error, value = self._receive(workers[ranks[connection]])
                if error:
                    failures[ranks[connection]] = f"rank {ranks[connection]}:\n{error}"
                else:
                    values[ranks[connection]] = value
        if failures:
            raise AssertionError("\n".join(failures.values()))
        return [values[rank] for rank in range(self._size)]

    def _start(self) -> None:
        here, there = mp.Pipe()
        if self._afresh:
            process = mp.get_context("spawn").Process(target=self._main, args=(there,), daemon=True)
            process.start()
        else:
            process = start_forked(self._main, there)
        there.close()  # its end is read as such once the process has ended
        self._workers.append(_Worker(process, here))

    def _receive(self, worker: _Worker) -> tuple[str, Any]:
        try:
            answer: tuple[str, Any] = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=5)
            return f"the process ended without an answer, exit code {worker.process.exitcode}", None
        except pickle.UnpicklingError as error:
            return f"its answer can't be read: {error}", None
        return answer

    def _is_ready(self, worker: _Worker) -> bool:
        """Wait until a worker is through with clearing away; where it isn't fit for another case, return False."""
        if worker.ready:
            return worker.process.is_alive()
        worker.ready = worker.connection.poll(self._timeout_s) and self._receive(worker) == ("", "ready")
        return worker.ready


_pools = {backend: Pool(backend=backend) for backend in ("gloo", "late")}
for _pool in _pools.values():
    atexit.register(_pool.close)  # the workers end with the session
