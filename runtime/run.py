"""One execution of a program. The executor makes it; the functions that perform steps read and fill its registers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zinf_compile.ir.program import Program
from zinf_compile.ir.random_states import set_state_of
from zinf_compile.runtime.memory.handed_on import HandedOn
from zinf_compile.runtime.storage.value_space import ValueSpace
from zinf_compile.runtime.units.tiled_gradient import TileGradients
from zinf_compile.runtime.units.unit import Tile, Unit

from .context import Context


class Run:
    """One execution of a program: its registers, the units that fill its slots, and the gradients that are reduced in tiles."""

    __slots__ = ("context", "handed", "program", "random", "registers", "space", "takes_copies", "tiled", "units")

    def __init__(
        self,
        program: Program,
        units: Mapping[int, Unit | Tile],
        context: Context,
        args: list[Any],
        space: ValueSpace | None = None,
        handed: HandedOn | None = None,
    ) -> None:
        self.program = program
        self.units = units
        self.context = context
        self.registers: list[Any] = [*args, *[None] * (program.registers - len(args))]
        for register, value in program.constants.items():
            self.registers[register] = value
        self.space = space
        """Where saved values go that leave for a drive."""
        self.handed = handed
        """What a forward leaves for its backward; None: nothing."""
        self.takes_copies = False
        """Whether a register holds a `HeldCopy`."""
        self.tiled: dict[Unit, TileGradients] = {}
        self.random: dict[str, torch.Tensor] = {}
        """By device: the state that its random generator gets back when compute that runs again has drawn its numbers."""

    def free(self, registers: Sequence[int]) -> None:
        """Let go of values that are needed no longer."""
        for register in registers:
            self.registers[register] = None

    def gradient_of(self, tile: Tile) -> TileGradients:
        """Return the gradient of all tiles of a unit."""
        if tile.unit not in self.tiled:
            self.tiled[tile.unit] = TileGradients(tile.unit)
        return self.tiled[tile.unit]

    def put_random_states_back(self) -> None:
        """Give random generators back the states that they had before compute ran again, where an error came in between."""
        for device, state in self.random.items():
            set_state_of(device, state)
        self.random.clear()
