"""A job that trains with everything on a drive, in a process of its own."""

from __future__ import annotations

import warnings
from multiprocessing.connection import Connection

import torch
from tiers import compiled, options_for, sundry, train_step
from training import adamw


def train(folder: str, steps: int, said: Connection | None = None) -> None:
    """Train; say the losses of the first and the tenth step, to the standard output where there is no connection."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = compiled(sundry(), options_for(("nvme",) * 3, folder, piece=96))
    optimizer = adamw(model.parameters())
    for step in range(steps):
        losses = train_step(model, optimizer, step % 10)
        if step in (0, 9):
            if said is None:
                print(losses, flush=True)
            else:
                said.send(losses)
