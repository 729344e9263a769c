"""Training with a save every other step, in processes that are killed at a point of it, as a function that tests start."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_resume import Run

import zinf_compile
from zinf_compile.checkpoint.manifest import saves_in
from zinf_compile.checkpoint.parts_writer import PartsWriter

STEPS, KEPT = 12, 2


@dataclasses.dataclass(frozen=True)
class Kill:
    """Where a rank is killed: as it begins the call of this number, counted from 1, of what a point is."""

    point: str
    """`data`, `fsync`, `rename` or `cleanup` (in its middle)."""
    rank: int
    number: int


MOST = {"data": 150, "fsync": 12, "rename": 14, "cleanup": 3}
"""Calls of each point that a run makes at least, on rank 0, before its last save is through."""


def seeded(point: str, seed: int) -> Kill:
    """Return a moment; only rank 0 renames and cleans up."""
    draw = random.Random(f"{point} {seed}")
    rank = draw.randrange(2) if point == "data" else 0
    return Kill(point, rank, draw.randint(1, MOST[point]))


def trained(rank: int, size: int, folder: str, options: dict[str, Any], kill: Kill | None) -> Any:
    """Go on from the last checkpoint, if there is one, to the end; return the whole states."""
    options = {**options, "process_group": dist.new_group(list(range(size)))}
    run, done = Run(options, rank), 0
    if saves_in(Path(folder)):
        extra = zinf_compile.load(folder, run.both, run.optimizers)
        done = extra["step"]
        run.scheduler.load_state_dict(extra["scheduler"])
    else:
        torch.manual_seed(rank)
    if kill is not None and kill.rank == rank:
        _arm(kill)
    while done < STEPS:
        run.train(1)
        done += 1
        if done % 2 == 0:
            state = {"step": done, "scheduler": run.scheduler.state_dict()}
            zinf_compile.save(folder, run.both, run.optimizers, extra=state, keep=KEPT)
    return run.whole()


def _arm(kill: Kill) -> None:
    if kill.point == "data":
        _before(PartsWriter, "_write", kill.number)
    elif kill.point == "fsync":
        _before(os, "fsync", kill.number)
    elif kill.point == "rename":
        _before(os, "rename", kill.number)
    else:
        _before(shutil, "rmtree", kill.number, _remove_some)


def _before(owner: Any, name: str, number: int, act: Callable[..., object] = lambda *args, **kwargs: None) -> None:
    """Kill this process before the call of this number."""
    really, count = getattr(owner, name), 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            act(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return really(*args, **kwargs)

    setattr(owner, name, call)


def _remove_some(path: Path, **_: Any) -> None:
    for entry in sorted(path.iterdir())[::2]:
        entry.unlink()
