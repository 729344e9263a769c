"""Saves that begin in the middle of a deferred step of the small training, and what they have to hold."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from held_updates import held_updates
from small_training import Training
from torch.optim import Optimizer

import zinf_compile
from zinf_compile.optim.record import record_of


def step(training: Training, number: int = 0) -> None:
    torch.manual_seed(number)
    training.step()


def is_updating(optimizers: list[Optimizer]) -> bool:
    steps = [record_of(each).deferred for each in optimizers]
    return any(each is not None and not each.pending.is_over() for each in steps)


@contextlib.contextmanager
def saved_during_updates(training: Training, folder: Path, after: int) -> Iterator[threading.Event]:
    """Context after a step and a save, in which the step stands still after so many chunks until the given event is set."""
    zinf_compile.synchronize()
    with held_updates(after) as gate:
        step(training)
        zinf_compile.save(folder, training.model, training.optimizers)
        assert is_updating(training.optimizers), "the save waits for nothing"
        yield gate


def expected_in(name: str, drive: Path, steps: int = 1) -> Any:
    training = Training(name, drive)
    for number in range(steps):
        step(training, number)
    return training.whole()


def loaded(folder: Path, name: str, drive: Path) -> Any:
    other = Training(name, drive)
    step(other, 5)
    zinf_compile.load(folder, other.model, other.optimizers)
    return other.whole()
