"""Rows of the table of operators: the properties of a transfer operator, read by passes, analyses and the runtime.

A new transfer operator is a row in `ops`, a step that the executor performs, and the pass that inserts it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from .steps import Issued, Step

LANES = GATHER, REDUCE, READ, COPY_IN, COPY_OUT, WRITE = "gather", "reduce", "read", "copy in", "copy out", "write"
"""Lanes perform transfers one after the other: two directions between ranks, two of a drive, two between host and device."""

LONE_GROUP = -1
"""Group number of a transfer that is issued alone."""


class Volume(enum.Enum):
    """The part of a unit that one rank moves in a transfer."""

    NOTHING = enum.auto()
    SHARD = enum.auto()
    """Its own shard."""
    OTHER_SHARDS = enum.auto()
    """The shards of all other ranks, received or sent."""
    ROWS = enum.auto()
    """The other ranks' part of the rows that are looked up."""
    VALUES = enum.auto()
    """Values that compute has made, as a whole: their memory, once for all views of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """An operator's name, kernel, step in a program, and transfer."""

    name: str
    schema: str
    """Arguments and result. An argument `unit` is the hollow parameter, `src` and `dst` are tiers, `group` numbers transfers
    that are issued together. Without a `unit`, the first argument leads to it."""
    kernel: Callable[..., Any]
    """The operator's result on one process, where a shard is the whole unit."""
    step: Callable[[Sequence[Issued]], Step] | None = None
    """Makes the program's step of all operators of a group; None: passes replace the operator before a graph is lowered."""
    compute: bool = False
    """Counts as compute in a schedule, though the executor performs it."""
    lane: Callable[[str, str], str] | str | None = None
    """The lane that performs it, for a hop the one of (src, dst); None: it moves nothing."""
    volume: Volume = Volume.NOTHING
    collective: bool = False
    """All ranks take part, in the same order."""
    fake: Callable[..., Any] | None = None
    """Its result on fake tensors, where the kernel can't make that."""
    has_unit: bool = True
    """It moves a unit, or leads to one."""


SPECS: dict[object, OpSpec] = {}
"""The rows, by operator."""

SCHEDULE_OPS: set[object] = set()
"""Operators that the executor performs itself; everything else in a graph is compute."""

_library = Library("zinf", "DEF")
_positions: dict[object, dict[str, int]] = {}


def define(spec: OpSpec) -> torch._ops.OpOverload:
    """Add a row to the table, and return its operator, `zinf::name`."""
    _library.define(f"{spec.name}{spec.schema}")
    _library.impl(spec.name, spec.kernel, "CompositeExplicitAutograd")
    if spec.fake is not None:
        torch.library.register_fake(f"zinf::{spec.name}", spec.fake, lib=_library)
    operator: torch._ops.OpOverload = getattr(torch.ops.zinf, spec.name).default
    SPECS[operator] = spec
    _positions[operator] = {argument.name: place for place, argument in enumerate(operator._schema.arguments)}
    if spec.step is not None and not spec.compute:
        SCHEDULE_OPS.add(operator)
    return operator


def position_of(operator: object, argument: str) -> int | None:
    """Return the place of a named argument; None where the operator has none, or is not in the table."""
    return _positions.get(operator, {}).get(argument)


def moves_values(operator: object) -> bool:
    """Return whether the operator moves values that compute has made, or waits for them: no unit is behind it."""
    return position_of(operator, "values") is not None


def has_unit(operator: object) -> bool:
    """Return whether an operator of the table moves a unit, or leads to one; other operators of the table are about values."""
    return SPECS[operator].has_unit


def unit_position(operator: object) -> int:
    """Return the place of the argument that is the unit, or leads to it."""
    return position_of(operator, "unit") or 0
