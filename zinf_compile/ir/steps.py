"""The steps of a program: one transfer or one region of compute each, performed by the executor.

A step is made of the operators that are issued together (`Issued`, one for each) by its class's `of`, and says which registers it
reads and writes. Which operator becomes which step stands in the operator's row in `ops`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch


class GradAlias(enum.IntEnum):
    """Aliases of a gradient's memory besides its reduction. Decides whether it must be copied."""

    NOBODY = 0
    """It may become the shard."""
    GRAPH = 1
    """Later operators of the graph, which change nothing: it may be read while they run, also after the graph has returned."""
    CALLER = 2
    """Code outside, which may write to it once the graph has returned: a tangent, or memory that the graph also returns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Issued:
    """One operator of a schedule as plain values."""

    args: Mapping[str, Any]
    """By the names in its schema; a value of the graph as the number of its register."""
    out: int
    """Register of its result; -1 where it gives none."""
    dtype: torch.dtype
    """The type in which its unit is sent and held."""
    alias: Callable[[], GradAlias]
    """Aliases of the memory of its first argument."""


class Step(Protocol):
    """One transfer or region of compute, as the executor performs it."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Registers whose values it reads."""

    @property
    def writes(self) -> tuple[int, ...]:
        """Registers that it fills."""


@dataclasses.dataclass(frozen=True, slots=True)
class SwapIn:
    """Start to swap shards in by one hop."""

    src: str
    dst: str
    members: tuple[tuple[int, int], ...]
    """(register of the hollow parameter or of the handle of the swap before, register of the handle)."""

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> SwapIn:
        """Make one step of the swaps of one group, all over the same hop."""
        return cls(issued[0].args["src"], issued[0].args["dst"], tuple((i.args["unit"], i.out) for i in issued))

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(source for source, _ in self.members)

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(out for _, out in self.members)


@dataclasses.dataclass(frozen=True, slots=True)
class SwapOut:
    """Start to swap shards of reduced gradients out by one hop."""

    src: str
    dst: str
    members: tuple[tuple[int, int], ...]
    """(register of the handle of the reduction or of the swap before, register of the handle)."""

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> SwapOut:
        """Make one step of the swaps of gradients that were reduced together, all over the same hop."""
        return cls(issued[0].args["src"], issued[0].args["dst"], tuple((i.args["grad"], i.out) for i in issued))

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(source for source, _ in self.members)

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(out for _, out in self.members)


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Start gathering units, all in one transfer."""

    group: int
    members: tuple[tuple[int, int], ...]
    """(register of the hollow parameter or of the handle of its swap, register of the handle)."""
    dtype: torch.dtype
    """The type in which the units are sent and held: their own, or a narrower one, to which shards are cast first."""

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> Gather:
        """Make one step of the gathers of one group."""
        return cls(issued[0].args["group"], tuple((i.args["unit"], i.out) for i in issued), issued[0].dtype)

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(source for source, _ in self.members)

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(out for _, out in self.members)


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Make one gathered unit usable."""

    handle: int
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> Wait:
        """Make one step of one wait."""
        (only,) = issued
        return cls(only.args["handle"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.handle,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, slots=True)
class GatherRows:
    """Look up rows of a unit that is never gathered as a whole."""

    unit: int
    indices: int
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> GatherRows:
        """Make one step of one lookup."""
        (only,) = issued
        return cls(only.args["unit"], only.args["indices"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.unit, self.indices

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, slots=True)
class ReduceBuffer:
    """Take memory for the full gradient of a tile."""

    unit: int
    """Register of the tile."""
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> ReduceBuffer:
        """Make one step for one tile."""
        (only,) = issued
        return cls(only.args["unit"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.unit,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """Drop a full unit."""

    full: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> Release:
        """Make one step of one release."""
        (only,) = issued
        return cls(only.args["full"])

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.full,)

    @property
    def writes(self) -> tuple[int, ...]:
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class KeepUnit:
    """Save a full unit for the backward, in the memory that it was gathered into."""

    full: int
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> KeepUnit:
        """Make one step of one unit."""
        (only,) = issued
        return cls(only.args["full"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.full,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, slots=True)
class Reduce:
    """Start reduce-scattering gradients, all in one transfer."""

    group: int
    members: tuple[tuple[int, int, int, GradAlias], ...]
    """(register of the gradient, of the hollow parameter, of the result, and aliases of the gradient's memory)."""
    dtype: torch.dtype
    """The type in which gradients are sent and their shards kept; gradients of another type are cast before."""
    at_step: bool = False
    """Keep them whole instead, until their shards are first read."""

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> Reduce:
        """Make one step of the reductions of one group."""
        members = tuple((i.args["grad"], i.args["unit"], i.out, i.alias()) for i in issued)
        return cls(issued[0].args["group"], members, issued[0].dtype, issued[0].args["at_step"])

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(register for grad, unit, *_ in self.members for register in (grad, unit))

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(out for _, _, out, _ in self.members)


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """A stretch of compute: `fn([inputs...]) -> tuple`, which empties the list it is given."""

    fn: Callable[[list[Any]], Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    number: int = -1
    """Among the regions of its graph, as plans number them; several stretches may be parts of one."""
    name: str = ""
    """The blocks whose compute it is, for people."""

    @property
    def reads(self) -> tuple[int, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[int, ...]:
        return self.outputs
