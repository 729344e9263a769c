"""Programs: scheduled graphs as plain values, free of FX. Passes lower a graph to one, the executor performs it.

A program works on numbered registers. Registers 0..n-1 hold the graph's inputs; a register that holds a hollow parameter is
described by a `ParameterSlot`. Steps are performed in order, exactly as written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .formats import StateFormat, format_of
from .steps import Reduce, Step, SwapOut, Wait
from .tiling import Box, box_text, tile_shape, tile_stride

SlotKey = tuple[int, int]
"""Of a slot: position of the parameter among the inputs of the captured graph, and number of the tile; -1: it is none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """A graph's parameter placeholder; which parameter fills it is known at each call only."""

    index: int
    """Position among the inputs of the captured graph."""
    name: str
    """The parameter's name where the graph was captured; for messages."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    tiles: tuple[Box, ...] = ()
    """Boxes of its tiles; none where it is gathered as a whole."""
    reduced_in: torch.dtype | None = None
    """The type of its gradient between ranks and until the step; None: its own."""
    reduced_at_step: bool = False
    """Its gradient is kept whole until the step, and reduced then."""
    tile: int | None = None
    """The number of the tile, where the slot is one of a parameter's tiles."""

    @property
    def in_tiles(self) -> bool:
        """Whether it is cut into tiles, or one of them."""
        return bool(self.tiles) or self.tile is not None

    @classmethod
    def of(cls, parameter: torch.Tensor, name: str, *, index: int = 0, device: torch.device | None = None) -> ParameterSlot:
        """Describe a parameter as a graph's input on its device, or on another that it is meant for.

        Strides are empty where the layout has none; `eligibility` refuses such a parameter.
        """
        return cls(
            index=index,
            name=name,
            shape=tuple(parameter.shape),
            stride=tuple(parameter.stride()) if parameter.layout == torch.strided else (),
            dtype=parameter.dtype,
            device=device or parameter.device,
            requires_grad=parameter.requires_grad,
        )

    @property
    def key(self) -> SlotKey:
        """Unique among the slots of a graph and their tiles."""
        return self.index, -1 if self.tile is None else self.tile

    def cut(self, number: int) -> ParameterSlot:
        """Return one of the tiles."""
        box = self.tiles[number]
        return dataclasses.replace(
            self,
            name=self.name + box_text(box, self.shape),
            shape=tile_shape(box),
            stride=tile_stride(box, self.stride),
            tiles=(),
            tile=number,
        )

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The type in which its gradient is reduced over ranks, added up and kept until the step."""
        return self.reduced_in or self.dtype

    @property
    def format(self) -> StateFormat:
        """The format in which its values are stored."""
        return format_of(self.dtype)

    @property
    def reduce_format(self) -> StateFormat:
        """The format in which its gradient is sent, added up and kept."""
        return format_of(self.reduce_dtype)

    @property
    def bytes(self) -> int:
        """Bytes of the full parameter."""
        return self.format.bytes(self.numel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One scheduled graph, ready to run."""

    name: str
    """For messages: `forward of graph 0`."""
    registers: int
    inputs: int
    slots: Mapping[int, ParameterSlot]
    """Input register -> slot."""
    tiles: Mapping[int, tuple[int, int]]
    """Register -> input register of the parameter, and number of the tile; holds nothing, but names what is moved."""
    buffers: Mapping[int, str]
    """Input register -> name of a module's buffer, synchronised with rank 0 at its first call."""
    constants: Mapping[int, Any]
    """Registers that hold a fixed value."""
    steps: tuple[Step, ...]
    frees: tuple[tuple[int, ...], ...]
    """Registers whose value is needed no longer after each step."""
    outputs: tuple[int | tuple[int, ...] | None, ...]
    """Register of each output; None where the graph returns None; several that hold the gradients of all tiles of one unit."""
    leaves: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Input register of a parameter -> the tier to which its gradient leaves; those that stay on the device are left out."""
    sequence: tuple[str, ...]
    """The collectives in order, one line each: what all ranks must agree on."""
    kept: frozenset[int] = frozenset()
    """Registers of gathers whose unit is kept for the backward."""
    ends: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Register of a full unit that is released behind the last region -> input register of the parameter, or tile."""
    finds: frozenset[tuple[SlotKey, torch.dtype]] = frozenset()
    """Slots, by `ParameterSlot.key`, whose full units a backward finds on the device if its forward has left them there, with
    the types of their gathers: those before the first region, and those that a plan has stay until their use."""
    finds_planned: frozenset[tuple[SlotKey, torch.dtype]] = frozenset()
    """Those of them that a plan has stay, with the types of the shards: what a backward on several ranks finds."""
    last_gathers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Register of the last gather of each parameter, or tile -> its input register."""
    leaving: tuple[tuple[str, int], ...] = ()
    """Tier and bytes of each saved memory that leaves the device; 0 bytes where these change from call to call."""
    runs: tuple[tuple[int, int], ...] = dataclasses.field(init=False)
    """The steps, as [start, end): each alone, but for waits that follow one another."""

    def __post_init__(self) -> None:
        numbers = itertools.groupby(enumerate(self.steps), lambda item: isinstance(item[1], Wait) or -1 - item[0])
        spans = ([number for number, _ in run] for _, run in numbers)
        object.__setattr__(self, "runs", tuple((span[0], span[-1] + 1) for span in spans))

    def key_of(self, register: int) -> SlotKey:
        """Return the key of the slot that a register of a parameter, or of a tile, is."""
        unit, tile = self.tiles.get(register, (register, -1))
        return self.slots[unit].index, tile

    def digest(self) -> int:
        """Hash the collective sequence into 63 bits, the same on every machine."""
        return digest_of(self.sequence)


NOTHING = Program(
    name="nothing",
    registers=0,
    inputs=0,
    slots={},
    tiles={},
    buffers={},
    constants={},
    steps=(),
    frees=(),
    outputs=(),
    sequence=(),
)
"""A program without steps."""


def tiers_of_gradients(steps: Iterable[Step], tiles: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Return for each parameter whose gradient leaves the device the last tier on its way, by input register."""
    owner: dict[int, int] = {}
    found: dict[int, str] = {}
    for step in steps:
        if isinstance(step, Reduce):
            owner.update((out, tiles[unit][0] if unit in tiles else unit) for _, unit, out, _ in step.members)
        elif isinstance(step, SwapOut):
            for grad, out in step.members:
                owner[out] = owner[grad]
                found[owner[out]] = step.dst
    return found


def digest_of(lines: Sequence[str]) -> int:
    """Hash lines into 63 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest(), "big") >> 1
