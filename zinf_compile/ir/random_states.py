"""States of the default random generators of devices, as tensors."""

from __future__ import annotations

import torch

STATE_BYTES = 5056
"""Of the CPU's generator."""

ACCELERATOR_STATE_BYTES = 16
"""Of an accelerator's."""


def has_state(device: str) -> bool:
    """Return whether the state of a device's default generator can be read and set."""
    kind = torch.device(device)
    return kind.type == "cpu" or hasattr(torch.get_device_module(kind), "set_rng_state")


def state_of(device: str) -> torch.Tensor:
    """Return the state of a device's default generator."""
    kind = torch.device(device)
    return torch.get_rng_state() if kind.type == "cpu" else torch.get_device_module(kind).get_rng_state(kind)


def set_state_of(device: str, state: torch.Tensor) -> None:
    """Set it."""
    kind = torch.device(device)
    if kind.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(kind).set_rng_state(state, kind)
