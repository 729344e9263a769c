"""The bytes that graphs and optimizers of a rank may hold at once."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import nn

from zinf_compile.ir.sizes import BLOCK_BYTES, STAGING_BYTES, UNFORESEEN, Sides
from zinf_compile.ir.tiers import Tier

_SIDES = (Tier.DEVICE, Tier.HOST)

_NONE = Sides(0, 0)

_CAP_TO_STAGING = 64
"""A cap by the staging that it leaves for what no graph has planned."""


@dataclasses.dataclass(frozen=True, eq=False)
class Reservation:
    """The bytes that one graph may hold."""

    passing: int
    """The most that it gathers and reduces at once."""
    left: int
    """The most bytes of gradients that one region leaves behind."""
    reduced: int
    """These, and other gradients under way meanwhile."""
    chunk_buffers: int
    """Chunks that fit into memory beside it during a step."""
    chunk_numel: int = 0
    """Elements of the largest chunk that was planned for the parameters that it uses first; 0: it plans for none."""
    backward: bool = True
    """Whether it may make gradients beside earlier ones."""
    compute: int = 0
    """Bytes of `passing` that are compute's: activations and temporaries."""
    results: int = 0
    """Of these, results of the call before that the caller may still hold."""
    rounding: int = 0
    """Of these, what the allocator may add to gathers."""
    saved_outside: int = 0
    """Of `passing`, what other graphs had saved when it was compiled."""
    chunk: Sides = _NONE
    """Bytes of one chunk of each optimizer, where placements differ of each: a step takes no more of them than fit."""
    passing_host: int = 0
    """The most that passes through host memory at once, where the device has memory of its own."""
    staging: int | None = None
    """Bytes for staging unaligned blocks, part of `passing`; None: not limited."""
    least: Sides = _NONE
    """The same with as little memory as possible."""
    works: Sides = _NONE
    """The caps with which it and steps of an optimizer with two states work, as far as was known when it was planned."""
    wish: Sides = _NONE
    """Bytes that it would use beyond that: for transfers further ahead, and more chunks."""
    keepable: int = 0
    """Bytes of full units that it, and other graphs likewise, would keep gathered for backwards within a larger cap."""
    parameters: tuple[weakref.ref[torch.Tensor], ...] = ()
    """Those that it reads, if any."""
    caps: Sides = _NONE
    """Those within which it was planned."""

    @property
    def may_run(self) -> bool:
        """Whether the graph can be called again: Dynamo may keep it when all of its parameters are gone."""
        return not self.parameters or any(parameter() is not None for parameter in self.parameters)


class Reservations:
    """The reservations of all compiled graphs on one rank. None is exceeded while its schedule runs."""

    def __init__(self) -> None:
        self.device_cap: int | None = None
        self.host_cap: int | None = None
        self.declared_device: int | None = None
        self.declared_host: int | None = None
        """The last caps that options named, for this rank; what else it takes stays within them too."""
        self.tiles_of: int | None = None
        """The `device_memory` whose default tiles the parameters have; None: their sizes don't follow from it."""
        self.ahead: dict[Hashable, int] = {}
        """Bytes by which the transfers of a graph run ahead, as decided when all ranks compiled it, by what identifies it."""
        self.remade: dict[Hashable, int] = {}
        """Blocks of a forward that run again in its backward, as decided when all ranks compiled it, by what identifies it."""
        self.kept: dict[Hashable, tuple[int, ...]] = {}
        """The units that stay gathered from a forward to its backward, of those that could, likewise."""
        self._made: weakref.WeakSet[Reservation] = weakref.WeakSet()

    def declare(self, *, device: int | None, host: int | None) -> None:
        """Note caps that options name; None: they name none."""
        self.declared_device = self.declared_device if device is None else device
        self.declared_host = self.declared_host if host is None else host

    @property
    def caps(self) -> tuple[int | None, ...]:
        """The caps as they are, to be set again where what they were changed for is refused."""
        return self.device_cap, self.host_cap, self.declared_device, self.declared_host

    @caps.setter
    def caps(self, before: tuple[int | None, ...]) -> None:
        self.device_cap, self.host_cap, self.declared_device, self.declared_host = before

    def add(self, reservation: Reservation) -> None:
        """Count a reservation for as long as the graph lives that keeps it."""
        self._made.add(reservation)

    def remove(self, reservation: Reservation) -> None:
        """Count a reservation no more, though somebody may refer to it."""
        self._made.discard(reservation)

    @property
    def _counted(self) -> list[Reservation]:
        return [made for made in self._made if made.may_run]

    @property
    def passing(self) -> int:
        """The largest of all graphs, as one runs at a time."""
        return self.passing_within().device

    def passing_within(self, caps: Sides | None = None, *, backward: bool = False) -> Sides:
        """Return the largest of all graphs within `caps`, by default those in force; or of those that may make gradients.

        Where smaller ones were declared since a graph was planned, it counts with the least that it takes: how far it runs ahead
        was no need of its own, and is nothing that the caps of another model have to hold.
        """
        found = [self._within_caps(made, caps) for made in self._counted if made.backward or not backward]
        return Sides(max((each.device for each in found), default=0), max((each.host for each in found), default=0))

    def _within_caps(self, made: Reservation, caps: Sides | None = None) -> Sides:
        most = Sides(made.passing, made.passing_host)
        sides = zip(most, made.least, self._wider_sides(made, caps), strict=True)
        return Sides(*(least if wider else passing for passing, least, wider in sides))

    def _wider_sides(self, made: Reservation, caps: Sides | None = None) -> tuple[bool, bool]:
        """Say of both sides whether a graph was planned within larger caps than these, by default those in force and declared."""
        if self.declared_device is None and self.declared_host is None:
            return False, False
        device, host = caps or (self.device_cap, self.host_cap)
        return device is not None and made.caps.device > device, host is not None and made.caps.host > host

    def passing_alone(self, counts: Callable[[Reservation], bool]) -> int:
        """Return the largest of some of them, without what others of them save meanwhile."""
        return max((self._within_caps(made).device - made.saved_outside for made in self._counted if counts(made)), default=0)

    @property
    def passing_backward(self) -> int:
        """The largest of graphs that may make gradients beside earlier ones."""
        return self.passing_within(backward=True).device

    @property
    def compute(self) -> int:
        """The most activations and temporaries of any of them."""
        return max((reservation.compute for reservation in self._counted), default=0)

    @property
    def rounding(self) -> int:
        """What the allocator may add to gathers in all of them."""
        return min((reservation.rounding for reservation in self._counted if reservation.compute), default=0)

    @property
    def beside(self) -> int:
        """The most of the device that any of them has planned for all that isn't transient: states and gradients to come too."""
        return max((made.works.device - made.least.device for made in self._counted), default=0)

    @property
    def passing_host(self) -> int:
        """The same, for host memory beside the device."""
        return self.passing_within().host

    def works(self, side: Tier, held: int, *, second: int = 0, unforeseen: bool = False) -> int:
        """Return the smallest cap with which `held` bytes and what passes at once are within it, planned anew for that cap.

        `second`: bytes of gradients that backwards make beside earlier ones.
        Where more is held than was planned for, that plan has room to run further ahead, and takes it, but for one part in
        `UNFORESEEN`. `unforeseen`: no plan knows what is held beyond that, and may keep more units in its room (`keeps_more`): a
        smaller cap may do as well.
        """
        number = _SIDES.index(side)
        found = [
            (
                held + second * made.backward + made.least[number],
                made.works[number],
                made.wish[number] + (made.keepable if unforeseen and side == Tier.DEVICE else 0),
            )
            for made in self._counted
        ]
        return max((_within(least, planned, wish) for least, planned, wish in found), default=held + second)

    def above(self, side: Tier, cap: int, needed: int) -> int:
        """Return the smallest cap where `needed` bytes exceed the one in force, `cap`, though `works` is no more than that.

        Some graph runs as far ahead as one compiled before it, which had more room: in a larger cap, further.
        """
        wish = max((made.wish[_SIDES.index(side)] for made in self._counted), default=0)
        return _within(needed, cap, wish)

    @property
    def keeps_more(self) -> bool:
        """Whether a graph would keep more full units gathered for its backward within a larger cap."""
        return any(made.keepable for made in self._counted)

    def planned(self, side: Tier) -> int:
        """Return the smallest cap that graphs were planned with, steps and second gradients included."""
        return max((reservation.works[_SIDES.index(side)] for reservation in self._counted), default=0)

    @property
    def staging(self) -> int | None:
        """The least staging of all, within smaller caps that were declared since no more than these leave; None: no limit."""
        unplanned = self._staging_unplanned
        limits = [(made.staging, any(self._wider_sides(made))) for made in self._counted if made.staging is not None]
        return min((min(planned, unplanned) if wider else planned for planned, wider in limits), default=None)

    @property
    def staging_limit(self) -> int:
        """The bytes to stage at once: as planned; where nothing was, of what user code reads, as little as caps are small."""
        return self.staging or self._staging_unplanned

    @property
    def _staging_unplanned(self) -> int:
        caps = [cap for cap in (self.device_cap, self.host_cap) if cap is not None]
        return min([STAGING_BYTES, *(max(BLOCK_BYTES, cap // _CAP_TO_STAGING) for cap in caps)])

    @property
    def chunk_buffers(self) -> int | None:
        """The least number of chunks of all; None without graphs."""
        return min((reservation.chunk_buffers for reservation in self._counted), default=None)

    @property
    def chunk_numel(self) -> int | None:
        """The elements that a chunk may have; None where no graph has planned for any."""
        return max((reservation.chunk_numel for reservation in self._counted), default=0) or None

    @property
    def chunk(self) -> Sides:
        """The most bytes that any has planned for one chunk of each optimizer."""
        found = [reservation.chunk for reservation in self._counted]
        return Sides(max((each.device for each in found), default=0), max((each.host for each in found), default=0))

    @property
    def chunks(self) -> Sides:
        """The bytes of the chunks that a step has in memory at once, as all of them have planned for."""
        count = self.chunk_buffers or 1
        return Sides(count * self.chunk.device, count * self.chunk.host)

    @property
    def reduced(self) -> int:
        """The most bytes of gradients that any of them has under way."""
        return max((reservation.reduced for reservation in self._counted), default=0)

    @property
    def on_the_way(self) -> int:
        """The bytes of full gradients that may be in flight while a region makes more."""
        return self.reduced - max((reservation.left for reservation in self._counted), default=0)


def references(inputs: Iterable[object]) -> tuple[weakref.ref[torch.Tensor], ...]:
    """Return references to the parameters among a graph's inputs, for `Reservation.parameters`; none to fake ones."""
    found = [value for value in inputs if isinstance(value, torch.Tensor)]
    return tuple(weakref.ref(value) for value in found if type(value) is nn.Parameter or hasattr(value, "_zinf_unit"))


def _within(least: int, planned: int, wish: int) -> int:
    """Return the smallest cap for what needs `least` bytes, where a plan for `planned` takes up to `wish` of what is left."""
    more = max(0, least - planned)
    return least + min(wish, (UNFORESEEN - 1) * more)
