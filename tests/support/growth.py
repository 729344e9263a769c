"""Many steps of a model, and a step of each of several: what is in use afterwards is what was in use before."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from places import place
from tier_features import Compile
from tiers import sundry, train_step
from training import adamw

STEPS, EVERY, MODELS = 110, 10, 4


def used(folder: Path) -> tuple[int, int, int]:
    """Return descriptors, those of files in the folder, and threads."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return len(links), sum(str(folder) in link for link in links), threading.active_count()


def train_for_long(away: Compile, look: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """Return what `look` sees of a model at every tenth of many steps, and then behind a step of each of several others.

    It is given the model; of those others, which are gone by then, the first one. That one goes when this returns.
    """

    def seen() -> Any:
        gc.collect()
        return look(model)

    model = away(sundry().to(place()))
    optimizer = adamw(model.parameters())
    steps, models = [], []
    for step in range(STEPS + 1):
        train_step(model, optimizer, step % 7)
        if step and step % EVERY == 0:
            steps.append(seen())
    for number in range(MODELS):
        torch.compiler.reset()
        other = away(sundry().to(place()))
        trained = adamw(other.parameters())
        train_step(other, trained, number)
        del other, trained
        torch.compiler.reset()
        models.append(seen())
    return steps, models
