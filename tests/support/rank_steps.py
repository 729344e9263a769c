"""Ranks whose optimizers don't step alike: what each of them does, as functions that `test_steps_compared.py` starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Mlp, vectors
from torch import nn
from training import BACKEND

import zinf_compile

Act = Callable[["Run"], None]


class Run:
    """A model in training on this rank."""

    def __init__(self, rank: int, size: int, folder: str, **options: Any) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        self.options = {"process_group": dist.new_group(list(range(size))), "timeout_s": 20.0, **options}
        torch.manual_seed(3)
        self.model = Mlp()
        self.compiled: Any = torch.compile(self.model, backend=BACKEND, options=self.options)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self._batches = 0

    def backward(self) -> None:
        """Compute the gradients of one more batch."""
        self._batches += 1
        self.compiled(*vectors(self._batches, self.rank)).backward()

    def step(self, *, skip: bool = False) -> None:
        """Take one step."""
        self.backward()
        if not skip:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def skip_on_one_rank(self) -> None:
        """Take one step together, one on rank 0 alone."""
        self.step()
        self.step(skip=self.rank == 1)


def outcomes(rank: int, size: int, folder: str) -> dict[str, str]:
    """Run every case over a group of its own; return what each ended with."""
    found = {}
    for name, case in CASES.items():
        torch.compiler.reset()
        try:
            case(rank, size, folder)
            found[name] = "no error"
        except zinf_compile.ZinfError as error:
            found[name] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return found


def skipped_step(rank: int, size: int, folder: str) -> None:
    run = Run(rank, size, folder)
    run.skip_on_one_rank()
    run.compiled(*vectors(0, rank))


def skipped_first_step(rank: int, size: int, folder: str) -> None:
    run = Run(rank, size, folder)
    run.step(skip=rank == 0)
    run.compiled(*vectors(0, rank))


def other_rate(rank: int, size: int, folder: str) -> None:
    run = Run(rank, size, folder)
    run.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    run.step()
    run.compiled(*vectors(0, rank))


def gradient_dropped(rank: int, size: int, folder: str) -> None:
    """One rank updates a parameter that the other leaves alone."""
    run = Run(rank, size, folder)
    run.backward()
    if rank == 1:
        run.model.first.bias.grad = None
    run.optimizer.step()
    run.compiled(*vectors(0, rank))


def whole_gradient(rank: int, size: int, folder: str) -> None:
    """Each rank computes a gradient for itself, of whole parameters."""
    run = Run(rank, size, folder)
    run.step()
    with zinf_compile.gathered(run.model):
        run.model.first.bias.square().sum().mul(rank + 1).backward()
    run.optimizer.step()
    run.compiled(*vectors(0, rank))


def deferred(rank: int, size: int, folder: str) -> None:
    """A step that goes on beside the next forward."""
    tiers = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": folder}
    run = Run(rank, size, folder, **tiers)
    run.step()
    run.skip_on_one_rank()
    run.compiled(*vectors(0, rank))


def during_a_save(act: Act) -> Callable[[int, int, str], None]:
    def case(rank: int, size: int, folder: str) -> None:
        run = Run(rank, size, folder)
        run.skip_on_one_rank()
        act(run)

    return case


def a_second_optimizer(rank: int, size: int, folder: str) -> None:
    """The graph of one model asks nothing of the optimizer of another one."""
    run, beside = Run(rank, size, folder), Run(rank, size, folder)
    beside.skip_on_one_rank()
    run.step()
    run.compiled(*vectors(0, rank))
    assert zinf_compile.full_state_dict(run.model) or rank
    beside.compiled(*vectors(0, rank))


def alike(rank: int, size: int, folder: str) -> None:
    """All that ranks may do together: schedules, closures, accumulation, skipped by a scaler, loaded, evaluated in between."""
    run = Run(rank, size, folder)
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for _ in range(2):
        run.step()
        schedule.step()
    run.backward()
    run.step()
    with torch.no_grad():
        run.compiled(*vectors(0, rank))

    def closure() -> torch.Tensor:
        run.optimizer.zero_grad()
        loss: torch.Tensor = run.compiled(*vectors(0, rank))
        loss.backward()
        return loss

    run.optimizer.step(closure)
    run.model.first.bias.grad = torch.ones(run.model.first.bias.shape)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.step()
    for fused in (False, True):
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=torch.tensor(0.01) if fused else 0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for overflows in (False, True, False):
            loss = run.compiled(*vectors(0, rank))
            scaler.scale(loss * (float("inf") if overflows and rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    zinf_compile.save_safetensors(run.model, Path(folder) / "alike")


def loaded_again(rank: int, size: int, folder: str) -> None:
    """Whole values for all ranks, of model and optimizer, are the way out."""
    run = Run(rank, size, folder)
    run.step()
    values, states = zinf_compile.full_state_dict(run.model), zinf_compile.full_optimizer_state_dict(run.optimizer)
    run.step(skip=rank == 1)
    zinf_compile.load_full_state_dict(run.model, values)
    zinf_compile.load_full_optimizer_state_dict(run.optimizer, states)
    for _ in range(2):
        run.step()
    run.compiled(*vectors(0, rank))


CASES: dict[str, Callable[[int, int, str], None]] = {
    "skipped_step": skipped_step,
    "skipped_first_step": skipped_first_step,
    "other_rate": other_rate,
    "gradient_dropped": gradient_dropped,
    "whole_gradient": whole_gradient,
    "deferred": deferred,
    "full_state_dict": during_a_save(lambda run: zinf_compile.full_state_dict(run.model) and None),
    "full_optimizer_state_dict": during_a_save(lambda run: zinf_compile.full_optimizer_state_dict(run.optimizer) and None),
    "save_safetensors": during_a_save(lambda run: zinf_compile.save_safetensors(run.model, run.folder) and None),
    "a_second_optimizer": a_second_optimizer,
    "alike": alike,
    "loaded_again": loaded_again,
}


def ending_after_a_skipped_step(rank: int, size: int, destroy: bool) -> None:
    """Take the last step on one rank alone, and end. Runs as the whole of a process."""
    model: nn.Module = Mlp()
    compiled = torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(*vectors(0, rank)).backward()
    if rank == 0:
        optimizer.step()
    if destroy:
        dist.barrier()
        dist.destroy_process_group()
