"""What `step_problem` must know beside the graphs: ranks, tiers and links, rates of compute, formats of states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import torch
from torch import fx

from zinf_compile.ir.compute_shape import PIECE_NUMEL
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.problem_parts import KEEP, Allowed, Link, Memory

Types = Callable[[ParameterSlot], tuple[torch.dtype, ...]]


def adam_types(slot: ParameterSlot) -> tuple[torch.dtype, ...]:
    """Return the types of Adam's states without a master copy."""
    return (slot.dtype, slot.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts of a machine and of a placement. Rates are those of one rank."""

    memories: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    world_size: int = 1
    allowed: Allowed = dataclasses.field(default_factory=Allowed)
    flops_per_second: Callable[[torch.dtype], float]
    """Of products, convolutions and attention in a type."""
    bytes_per_second: float
    """Of the device's memory."""
    seconds: Callable[[tuple[fx.Node, ...]], float | None] = lambda nodes: None
    """The seconds of a region where they are known, as from a measurement; None: estimated from its operations and bytes."""
    home: Callable[[ParameterSlot], Tier | None] = lambda slot: None
    """The tier on which a parameter's shard lives, where that is decided."""
    apart: Callable[[ParameterSlot], Hashable] = lambda slot: None
    """Parameters for which this differs are different units: they have, or may have, other homes."""
    stays: Callable[[ParameterSlot], bool] = lambda slot: False
    """Whether a parameter, once gathered, stays on the device until the step changes it."""
    launch_seconds: float = 0.0
    """Of each region beside."""
    only_params: bool = False
    """Leave gradients, states, saved values and temporaries out: a problem of the parameters' transfers alone. No copy outlasts
    the graphs."""
    state_types: Types = adam_types
    """The types of a parameter's states, a master copy among them."""
    has_master: Callable[[ParameterSlot], bool] = lambda slot: False
    """Whether the states have the values that are updated."""
    piece_numel: int = PIECE_NUMEL
    host_update_bytes_per_second: float = 1e10
    """Bytes that an update on the host reads and writes."""
    device_update_bytes_per_second: float = 1e11
    saved_choices: tuple[str, ...] = (KEEP,)
    """What may become of saved values."""
