"""Twins of which one has its parameters off the device: their values, as a state dict gives them, saved and in memory."""

from __future__ import annotations

import contextlib
import ctypes
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import compiled, options_for, sundry, train_step
from training import adamw, assert_same

import zinf_compile
from zinf_compile.runtime.device.simulated import SimulatedDevice, simulating

NVME = ("nvme", "nvme", "nvme")

VARIANTS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "nvme": (NVME, {}, False),
    "tiles": (NVME, {"tile": 180}, False),
    "host of a device": (("host", "host", "device"), {}, True),
    "nvme of a device": (("nvme", "host", "host"), {"tile": 180}, True),
}


class Trained:
    """A model with its parameters off the device, and its eager twin, each with its optimizer, after two steps."""

    def __init__(self, folder: Path, variant: str = "nvme") -> None:
        placement, others, _ = VARIANTS[variant]
        self.ours, self.eager = compiled(sundry(), options_for(placement, folder, **others)), sundry()
        self.optimizers = [adamw(model.parameters()) for model in (self.ours, self.eager)]
        self.steps, self.tiled = 0, "tile" in others
        for _ in range(2):
            self.step()

    def step(self) -> None:
        """Train both by one step, the last part of which may be deferred."""
        losses = [train_step(m, o, self.steps) for m, o in zip((self.ours, self.eager), self.optimizers, strict=True)]
        self.steps += 1
        if self.tiled:  # which changes the order of sums
            assert losses[0] == pytest.approx(losses[1])
            self.eager.load_state_dict(zinf_compile.full_state_dict(self.ours))
        else:
            assert losses[0] == losses[1]

    def check(self, state: dict[str, Any]) -> None:
        """Compare a state with eager's."""
        for name, value in self.eager.state_dict().items():
            assert_same(name, value, state[name])


@contextlib.contextmanager
def trained(folder: Path, variant: str = "nvme") -> Iterator[Trained]:
    """Context with a model in it."""
    with simulating(SimulatedDevice()) if VARIANTS[variant][2] else contextlib.nullcontext():
        yield Trained(folder, variant)


def saved(state: Any, save: Callable[..., None] = torch.save, **settings: Any) -> Any:
    """Save and load."""
    file = io.BytesIO()
    save(state, file, **settings)
    file.seek(0)
    return torch.load(file, weights_only=True)


def value_at(where: int, like: torch.Tensor) -> torch.Tensor:
    """Return what is in memory there."""
    content = (ctypes.c_char * like.nbytes).from_address(where)
    return torch.frombuffer(bytearray(content), dtype=like.dtype).as_strided(like.shape, like.stride())
