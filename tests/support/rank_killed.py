"""Training with a save every other step, in processes that are killed at a point of it, as a function that tests start."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_resume import MICRO_BATCHES, Run
from torch import nn

import zinf_compile
from zinf_compile.checkpoint import parts_writer
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.parts_writer import PartsWriter
from zinf_compile.runtime.units.pending_updates import Updates

STEPS, KEPT = 12, 2


@dataclasses.dataclass(frozen=True)
class Kill:
    """Where a rank is killed: at the call of this number, counted from 1, of what a point is."""

    point: str
    """`data`: what is written of a tensor at once; `fsync`; `rename`; `cleanup`: a folder that is removed, in its middle;
    `deferred`: the update of a chunk after `step()` has returned; `space`: the allocation of a file."""
    rank: int
    number: int
    under_way: bool
    """Once the call is under way, by another thread; else as it begins."""
    all_ranks: bool
    """The other rank is killed at the same time; else it has to end by itself."""


MOST = {"data": (220, 200), "fsync": (34, 15), "rename": (13, 5), "cleanup": (3, 0), "deferred": (80, 80), "space": (5, 5)}
"""Calls of each point that a run makes at least before its last save begins, on ranks 0 and 1."""


def seeded(point: str, seed: int) -> Kill:
    """Return a moment of a run that begins anew."""
    draw = random.Random(f"{point} {seed}")
    rank = draw.choice([rank for rank, calls in enumerate(MOST[point]) if calls])
    number = draw.randint(1, MOST[point][rank])
    return Kill(point, rank, number, under_way=draw.random() < 0.5, all_ranks=draw.random() < 0.25)


def trained(
    rank: int, size: int, folder: str, options: dict[str, Any], kill: Kill | None, averaged: bool = True
) -> tuple[Any, list[float]]:
    """Go on from the last checkpoint, if there is one, to the end; return the whole states, and the losses since then.

    `averaged`: with an averaged model, which a save writes before it returns; else all of a save is left to its thread.
    """
    options = {**options, "process_group": dist.new_group(list(range(size)))}
    run, done = Run(options, rank), 0
    if not averaged:
        run.both = nn.ModuleDict({"model": run.model})
    if saves_in(Path(folder)):
        extra = zinf_compile.load(folder, run.both, run.optimizers)
        done = extra["step"]
        run.scheduler.load_state_dict(extra["scheduler"])
    else:
        torch.manual_seed(rank)
    if kill is not None:
        processes: list[int] = [0] * size
        dist.all_gather_object(processes, os.getpid())
        if kill.rank == rank:
            _arm(kill, [each for each in processes if kill.all_ranks or each == os.getpid()])
    steps = STEPS - done
    while done < STEPS:
        run.train(1)
        done += 1
        if done % 2 == 0:
            state = {"step": done, "scheduler": run.scheduler.state_dict()}
            zinf_compile.save(folder, run.both, run.optimizers, extra=state, keep=KEPT)
    zinf_compile.wait_for_save()  # the last one, and the clean-up after it
    return run.whole(), [loss.item() for loss in run.losses[len(run.losses) - steps * MICRO_BATCHES :]]


def _arm(kill: Kill, processes: Sequence[int]) -> None:
    point = {
        "data": (PartsWriter, "_write"),
        "fsync": (os, "fsync"),
        "rename": (os, "rename"),
        "cleanup": (shutil, "rmtree"),
        "deferred": (Updates, "updated"),
        "space": (parts_writer, "allocate"),
    }[kill.point]
    told, count, really = threading.Event(), 0, getattr(*point)

    def die() -> None:
        for process in sorted(processes, key=os.getpid().__eq__):  # itself last
            os.kill(process, signal.SIGKILL)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if kill.point == "deferred" and threading.current_thread() is threading.main_thread():
            return really(*args, **kwargs)  # the chunk that `step()` updates
        count += 1
        if count == kill.number:
            if kill.point == "cleanup":
                _remove_some(*args)
            if not kill.under_way:
                die()
            told.set()  # the other thread runs when the call lets go of the interpreter
        return really(*args, **kwargs)

    threading.Thread(target=lambda: (told.wait(), die()), daemon=True).start()
    setattr(*point, call)


def _remove_some(path: Path) -> None:
    for entry in sorted(path.iterdir())[::2]:
        entry.unlink()
