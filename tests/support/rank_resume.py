"""Training on from a checkpoint beside the run that was never interrupted, as functions that `test_resume.py` starts."""

from __future__ import annotations

import logging
import random
import time
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiers import context_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import BACKEND, whole_gradient

import zinf_compile
from zinf_compile.optim.record import record_of

MICRO_BATCHES = 3


class Noisy(nn.Module):
    """Draws random numbers, keeps running means, and counts its calls in a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(19, 24), nn.BatchNorm1d(24), nn.Linear(24, 7)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)).square().mean()


class Run:
    """A model in the middle of training: two optimizers, a scheduler, and an averaged model."""

    def __init__(self, options: dict[str, Any], seed: int, device: str = "cpu") -> None:
        torch.compiler.reset()
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.device = device
        self.model = Noisy().to(device)
        self.compiled = torch.compile(self.model, backend=BACKEND, options=options)
        self.optimizers = [
            torch.optim.AdamW(self.model.first.parameters(), lr=0.02, fused=True),
            torch.optim.SGD([*self.model.norm.parameters(), *self.model.last.parameters()], lr=0.02, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.losses: list[torch.Tensor] = []
        self.micro_batches(1)
        self.step()
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.both = nn.ModuleDict({"model": self.model, "averaged": self.averaged})

    def micro_batches(self, count: int) -> None:
        """Accumulate gradients of random batches, which differ from rank to rank."""
        for _ in range(count):
            batch = torch.randn(6, 19) * random.random() * np.random.rand()
            loss = self.compiled(batch.to(self.device)) / MICRO_BATCHES
            loss.backward()
            self.losses.append(loss.detach())

    def step(self) -> None:
        """Apply the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.scheduler.step()

    def train(self, steps: int, *, held_s: float = 0.0) -> None:
        """Take whole steps; the part of them that is deferred waits for `held_s` seconds before it begins."""
        for _ in range(steps):
            self.averaged.update_parameters(self.model)
            self.micro_batches(MICRO_BATCHES)
            if held_s:
                context_of(self.model).lanes.update.submit(partial(time.sleep, held_s))
            self.step()

    def pending(self) -> bool:
        """Say whether a part of the last step was deferred, and nobody has waited for all of it."""
        return any(record_of(optimizer).deferred is not None for optimizer in self.optimizers)

    def whole(self) -> dict[str, Any]:
        """Return all that training changes, whole on rank 0."""
        gradients = {name: whole_gradient(p) for name, p in self.model.named_parameters()}
        return {
            "model": zinf_compile.full_state_dict(self.both),
            "optimizers": [zinf_compile.full_optimizer_state_dict(each) for each in self.optimizers],
            "gradients": {name: None if grad is None else grad.cpu() for name, grad in gradients.items()},
            "scheduler": self.scheduler.state_dict(),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2:]),
        }


def resumed(rank: int, size: int, folder: str, options: dict[str, Any], done: int, device: str = "cpu") -> tuple[Any, ...]:
    """Save with `done` micro-batches of a step; return the whole states as they were then, as loaded, and after training both.

    Then the calls that a buffer counted, and whether a deferred step was pending at the save.
    """
    options = {**options, "process_group": dist.new_group(list(range(size)))} if size > 1 else options
    run = Run(options, rank, device)
    run.train(2, held_s=0.3)
    run.micro_batches(done)
    pending = run.pending()
    zinf_compile.save(folder, run.both, run.optimizers, extra={"scheduler": run.scheduler.state_dict()})
    saved = run.whole()
    run.micro_batches(MICRO_BATCHES - done)
    run.step()
    run.train(1)
    again = Run(options, rank + 77, device)
    again.micro_batches(1)
    again.scheduler.load_state_dict(zinf_compile.load(folder, again.both, again.optimizers)["scheduler"])
    loaded, calls = again.whole(), float(again.model.calls)
    again.micro_batches(MICRO_BATCHES - done)
    again.step()
    again.train(1)
    return saved, loaded, run.whole(), again.whole(), calls, pending


def saved_generators(rank: int, size: int, folder: str) -> tuple[torch.Tensor, float, float]:
    """Save after a step; return the next numbers of the generators."""
    run = Run({"process_group": dist.new_group(list(range(size)))} if size > 1 else {}, rank)
    zinf_compile.save(folder, run.model)
    return torch.rand(3), random.random(), np.random.rand()


def loaded_generators(rank: int, size: int, folder: str) -> tuple[torch.Tensor, float, float, list[str]]:
    """Load after a step; return the next numbers of the generators, and what is logged."""
    run = Run({"process_group": dist.new_group(list(range(size)))} if size > 1 else {}, rank + 50)
    logged: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("zinf_compile")
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        zinf_compile.load(folder, run.model)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return torch.rand(3), random.random(), np.random.rand(), [line for line in logged if "random generators" in line]
