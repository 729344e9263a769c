"""Models whose steps end during the next forward, beside eager twins."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from models import TiedWords, tokens
from optimizers import assert_same_states
from tiers import Placement, compiled, context_of, options_for
from torch import nn
from torch.optim import Optimizer
from training import adamw, assert_same, plain_step
from twin_models import Twins

import zinf_compile
from zinf_compile.optim.record import record_of
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

Compile = Callable[[nn.Module], nn.Module]
Sides = list[tuple[nn.Module, Optimizer]]


DRIVE = ("nvme", "nvme", "nvme"), False
PLACES: dict[str, tuple[Placement, bool]] = {
    "drive": DRIVE,
    "drive apart": (("nvme", "nvme", "nvme"), True),
    "memory apart": (("device", "device", "host"), True),
    "host apart": (("host", "host", "host"), True),
}
"""Tiers, and whether beside a device with memory of its own."""


@contextlib.contextmanager
def deferring(place: str, folder: Path) -> Iterator[Compile]:
    """Context with what compiles a model so that its steps are deferred."""
    placement, apart = PLACES[place]
    options = options_for(placement, folder, piece=128)
    with simulating(SimulatedDevice()) if apart else contextlib.nullcontext():
        torch.compiler.reset()
        yield lambda model: compiled(model, options)


def both(on_drive: Compile, make: Callable[..., Optimizer] = adamw, *, steps: int = 2) -> Sides:
    """Return an eager model and its twin on the drive, each with its optimizer; the last of some steps is a late one."""
    sides = Twins(TiedWords, on_drive, make).sides
    for number in range(steps):
        step_on(sides, number)
    return sides


def step_on(sides: Sides, number: int) -> None:
    """Take one step with each and compare the losses, nothing else: that would wait for the update."""
    losses = [plain_step(model, optimizer, tokens(number)).detach() for model, optimizer in sides]
    assert_same(f"loss of step {number}", *losses)


def check(sides: Sides) -> None:
    """Take one step more, then compare."""
    step_on(sides, 99)
    compare(sides)


def compare(sides: Sides) -> None:
    """Compare parameters and states."""
    (eager, first), (ours, second) = sides
    whole = zinf_compile.full_state_dict(ours)
    for name, value in eager.state_dict().items():
        assert_same(name, value, whole[name])
    assert_same_states(first, second)


def is_late(optimizer: Optimizer) -> bool:
    """Say whether the last step left something to be done."""
    return record_of(optimizer).deferred is not None


def delay(model: nn.Module) -> None:
    """Let what is left of the next step begin a little later."""
    context_of(model).lanes.update.submit(lambda: time.sleep(0.05))
