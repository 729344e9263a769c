"""Saves in the background on several ranks, as functions that `test_background_save.py` starts."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from held_saves import held_saves
from held_updates import held_updates
from rank_resume import MICRO_BATCHES, Run

import zinf_compile
from zinf_compile.checkpoint import background, parts_writer, reserved_space
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.parts_writer import PartsWriter
from zinf_compile.errors import StepFailedError
from zinf_compile.optim.chunk_step import ChunkStep
from zinf_compile.optim.record import record_of


def in_background(function: Any, act: Any) -> Any:
    """Return a method that calls `act` first where it is called on the thread of a save."""

    def call(self: Any, *args: Any) -> Any:
        if threading.current_thread().name == "zinf save":
            act()
        return function(self, *args)

    return call


def _grouped(size: int, options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "process_group": dist.new_group(list(range(size)))} if size > 1 else options


def trained_beside(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[Any, Any, bool, bool]:
    """Take steps while a save's own threads stand still; return the states as they were at the save, and what a load gives."""
    run = Run(_grouped(size, options), rank)
    run.train(1)
    saved = run.whole()
    with held_saves() as gate:
        path = zinf_compile.save(folder, run.both, run.optimizers, extra={"scheduler": run.scheduler.state_dict()})
        run.train(2)
        there_before = path.exists()
        gate.set()
        zinf_compile.wait_for_save()
    there_after = path.exists()
    again = Run(_grouped(size, options), rank + 5)
    again.scheduler.load_state_dict(zinf_compile.load(path, again.both, again.optimizers)["scheduler"])
    return saved, again.whole(), there_before, there_after


def _without_thread(*, here: bool) -> Any:
    """Context in which no save gets a thread, where that is `here`."""
    start = threading.Thread.start

    def start_none(thread: threading.Thread) -> None:
        if here and thread.name == "zinf save":
            raise RuntimeError("can't start new thread")
        start(thread)

    return mock.patch.object(threading.Thread, "start", start_none)


def failed(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[list[str], Any, Any, list[int]]:
    """Let the last rank's drive fail during saves; return the errors, the states with and without that, and the saves."""
    options, errors = _grouped(size, options), []
    last = rank == size - 1

    def fail() -> None:
        if last:
            raise OSError(errno.EIO, os.strerror(errno.EIO), "the drive")

    def raises(function: Any) -> None:
        try:
            function()
        except (OSError, RuntimeError, zinf_compile.CheckpointError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    runs = []
    for fails in (True, False):
        run = Run(options, rank)
        run.train(1)
        if fails:
            zinf_compile.save(folder, run.both, run.optimizers, wait=True)
        for ending in ("step", "a step of what is saved without optimizers", "wait_for_save", "no thread"):
            broken = mock.patch.object(PartsWriter, "finish", in_background(PartsWriter.finish, fail))
            with _without_thread(here=last) if ending == "no thread" else broken:
                if fails:
                    zinf_compile.save(folder, run.both, () if "without" in ending else run.optimizers)
                run.micro_batches(MICRO_BATCHES)
                if fails and "step" in ending:
                    if rank == size - 1:
                        background._current[0]._thread.join()
                    if size > 1:
                        dist.barrier()
                    raises(run.optimizers[0].step)
                elif fails:
                    raises(zinf_compile.wait_for_save)
            zinf_compile.wait_for_save()  # it was raised
            run.step()
        runs.append(run.whole())
    return errors, *runs, saves_in(Path(folder))


def _is_updating(run: Run) -> bool:
    steps = [record_of(each).deferred for each in run.optimizers]
    return any(step is not None and not step.pending.is_over() for step in steps)


def saved_during_updates(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[Any, Any, bool]:
    """Save while the last rank's step stands still in its middle, and the others' are over; return the states, and a load's."""
    run = Run(_grouped(size, options), rank)
    run.train(1)
    zinf_compile.synchronize()
    holds = rank == size - 1
    with held_updates(2) if holds else contextlib.nullcontext():
        run.train(1)
        if not holds:
            zinf_compile.synchronize()
        zinf_compile.save(folder, run.both, run.optimizers, extra={"scheduler": run.scheduler.state_dict()})
        updating = _is_updating(run)
    saved = run.whole()
    run.train(1)
    zinf_compile.wait_for_save()
    again = Run(_grouped(size, options), rank + 5)
    again.scheduler.load_state_dict(zinf_compile.load(folder, again.both, again.optimizers)["scheduler"])
    return saved, again.whole(), updating


def failed_with_a_step(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[str, Any, Any, list[int]]:
    """Let the last rank's step fail while it is saved; return the error, the states before and after a load, and the saves."""
    run, error, finish = Run(_grouped(size, options), rank), "", ChunkStep.finish
    run.train(1)
    before = run.whole()
    zinf_compile.save(folder, run.both, run.optimizers, extra={"scheduler": run.scheduler.state_dict()}, wait=True)
    gate = threading.Event()

    def fail(chunk: ChunkStep, *args: Any) -> None:
        if rank == size - 1 and threading.current_thread() is not threading.main_thread():
            gate.wait(60)
            raise RuntimeError("out of luck")
        finish(chunk, *args)

    with mock.patch.object(ChunkStep, "finish", fail):
        run.train(1)
        zinf_compile.save(folder, run.both, run.optimizers)
        gate.set()
        try:
            zinf_compile.wait_for_save()
        except (StepFailedError, zinf_compile.CheckpointError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        zinf_compile.wait_for_save()  # it was raised
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    run.scheduler.load_state_dict(zinf_compile.load(folder, run.both, run.optimizers)["scheduler"])
    return error, before, run.whole(), saves_in(Path(folder))


@contextlib.contextmanager
def _watched_writes() -> Iterator[list[str]]:
    """Context that gives the keys of tensors of which anything is written."""
    written, write = list[str](), PartsWriter._write

    def noted(writer: PartsWriter, key: str, *args: Any) -> None:
        written.append(key)
        write(writer, key, *args)

    with mock.patch.object(PartsWriter, "_write", noted):
        yield written


def allocated_beside(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[list[str], bool, Any, Any]:
    """Hold the last rank's allocation until all have saved; return what was written by then, and the states and a load's.

    Then whether the next step had begun to change what is saved.
    """
    options = _grouped(size, options)
    run, allocated, gate = Run(options, rank), threading.Event(), threading.Event()
    run.train(1)
    saved = zinf_compile.full_state_dict(run.model)
    allocate = parts_writer.allocate

    def held(*args: Any) -> None:
        if rank == size - 1:
            gate.wait(60)
        allocate(*args)
        allocated.set()

    with _watched_writes() as written, mock.patch.object(parts_writer, "allocate", held):
        zinf_compile.save(folder, run.model, run.optimizers)
        if rank < size - 1:
            allocated.wait(60)
        step = threading.Timer(0.3, gate.set)  # what the next step changes is to be written first
        dist.barrier()
        before = list(written)
        step.start()
        run.train(1)
        step.join()
        zinf_compile.wait_for_save()
    again = Run(options, rank + 5)
    zinf_compile.load(folder, again.model, again.optimizers)
    return before, bool(written), saved, zinf_compile.full_state_dict(again.model)


def without_space(rank: int, size: int, folder: str, options: dict[str, Any]) -> tuple[list[str], list[str], Any, Any]:
    """Let the last rank's allocation fail on the thread of a save, or the thread itself; return the errors, and what was written.

    Then the states after training on, with and without that.
    """
    options, errors = _grouped(size, options), []
    last, written_all = rank == size - 1, list[str]()

    full = mock.patch.object(reserved_space, "fallocate", return_value=errno.EDQUOT)
    runs = []
    for fails in (True, False):
        run = Run(options, rank)
        run.train(1)
        if fails:
            zinf_compile.save(folder, run.model, run.optimizers, wait=True)
        for ending in ("wait_for_save", "step", "no thread"):
            broken = _without_thread(here=True) if ending == "no thread" else full
            with broken if last else contextlib.nullcontext(), _watched_writes() as written:
                if fails:
                    zinf_compile.save(folder, run.model, run.optimizers)
                if fails and ending == "step":
                    background._current[0]._thread.join()
                    if size > 1:
                        dist.barrier()
                try:
                    if ending == "step":
                        run.train(1)
                    else:
                        zinf_compile.wait_for_save()
                except (OSError, RuntimeError, zinf_compile.CheckpointError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                    if ending == "step":
                        run.step()
            written_all += written
            zinf_compile.wait_for_save()  # it was raised
        run.train(1)
        runs.append(run.whole())
    return errors, written_all, *runs
