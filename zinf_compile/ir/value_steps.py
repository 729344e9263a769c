"""Steps of values which a forward saves for its backward: moved, dropped and copied, and of the states of random generators.

Made of the operators of `ops`, as those of `steps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

from .steps import Issued


@dataclasses.dataclass(frozen=True, slots=True)
class _Swap:
    """One hop of the memory of saved values."""

    src: str
    dst: str
    values: tuple[int, ...]
    """Registers of the values, all views of one memory, or of what the forward saved in their place; or the one register of the
    handle of the hop before."""
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> Self:
        """Make one step of one swap."""
        (only,) = issued
        return cls(only.args["src"], only.args["dst"], registers_of(only.args["values"]), only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return self.values

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


class SwapValuesOut(_Swap):
    """Start to move the memory of saved values away from the device, by one hop."""

    __slots__ = ()


class SwapValuesIn(_Swap):
    """Start to move the memory of saved values to the device, by one hop."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WaitValue:
    """Wait until the memory of a saved value has moved."""

    handle: int
    number: int
    """Of the value, among those that moved together."""
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> WaitValue:
        """Make one step of one wait."""
        (only,) = issued
        (handle,) = registers_of(only.args["values"])
        return cls(handle, only.args["number"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.handle,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, slots=True)
class _OfOne:
    """What becomes of one value."""

    value: int
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> Self:
        """Make one step of one value."""
        (only,) = issued
        return cls(only.args["value"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.value,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


class DropValue(_OfOne):
    """Let a saved value go; what the forward returns in its place holds no memory."""

    __slots__ = ()


class CopyValue(_OfOne):
    """Copy a value that the caller may write to before the backward."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class RandomState:
    """Record the state of a device's default random generator."""

    device: str
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> RandomState:
        """Make one step of one generator."""
        (only,) = issued
        return cls(only.args["generator"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return ()

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


@dataclasses.dataclass(frozen=True, slots=True)
class SetRandomState:
    """Set the state of a device's default random generator, and return the one before."""

    state: int
    device: str
    out: int

    @classmethod
    def of(cls, issued: Sequence[Issued]) -> SetRandomState:
        """Make one step of one generator."""
        (only,) = issued
        return cls(only.args["state"], only.args["generator"], only.out)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.state,)

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)


def registers_of(argument: int | Sequence[int]) -> tuple[int, ...]:
    """Return the registers of a list of values, or the one of their handle."""
    return (argument,) if isinstance(argument, int) else tuple(argument)
