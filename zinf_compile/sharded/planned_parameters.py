"""Parameters that earlier graphs planned for, whose chunks pass through memory in steps.

Those of the model that runs are updated in the same chunks as the parameters of the graph that is compiled. Others, as of a
discriminator beside a generator, have optimizers and chunks of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from zinf_compile._torch import no_torch_function
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import Sides
from zinf_compile.ir.tiers import Placement
from zinf_compile.plan.memory_model import MemoryModel, step_chunk
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit

_FIRST = -(1 << 40)
"""Of indices that no graph's input has, nor a parameter that no graph has seen."""

_NONE = Sides(0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedParameters:
    """Those of some ranks that are trained, and their homes."""

    slots: Sequence[ParameterSlot] = ()
    """Of the model that runs."""
    homes: Mapping[int, Placement] = dataclasses.field(default_factory=dict)
    chunk_numel: int = 0
    """The elements of the largest chunk that was planned for: steps keep to it."""
    beside: Sides = _NONE
    """Bytes of the chunks of other models."""
    held: Sides = _NONE
    """Bytes that optimizers of any of them hold already for a chunk each."""

    @classmethod
    def of(cls, context: Context, but: Collection[Unit], *, running: Collection[Unit], size: int) -> PlannedParameters:
        """Return all but those of some units; `running`: those of the model that runs. The same on each of `size` ranks."""
        families: dict[int | None, list[Unit]] = {}
        for unit in sorted(context.units, key=lambda unit: unit.serial):
            if unit not in but:
                families.setdefault(None if unit in running else unit.family, []).append(unit)
        reservations, topology, beside = context.memory.reservations, context.link.topology, _NONE
        mine, homes = _described(families.pop(None, ()))
        for units in families.values():
            slots, at = _described(units)
            if slots:
                placements = Placements(units[0].placement, at)
                beside = beside.plus(
                    step_chunk(slots, placements, size=size, topology=topology, least=reservations.chunk_numel)[1]
                )
        return cls(mine, homes, reservations.chunk_numel or 0, beside, context.memory.chunks)

    def with_chunks(self, model: MemoryModel, slots: Sequence[ParameterSlot], placements: Placements) -> MemoryModel:
        """Return the model of parameters with these homes, with the chunks of steps over all of them."""
        numel, chunk = model.chunk_numel, model.chunk
        if self.slots:
            everywhere = Placements(placements.rest, {**placements.own, **self.homes})
            together = [*self.slots, *slots]
            numel, chunk = step_chunk(together, everywhere, size=model.size, topology=model.topology, least=self.chunk_numel)
        return dataclasses.replace(model, chunk_numel=numel, chunk=chunk.plus(self.beside))

    def chunk_to_come(self, model: MemoryModel) -> Sides:
        """Return the bytes of those chunks that no optimizer holds yet."""
        return Sides(*(max(0, planned - held) for planned, held in zip(model.chunk, self.held, strict=True)))


def _described(units: Sequence[Unit]) -> tuple[list[ParameterSlot], dict[int, Placement]]:
    """Return the parameters that are trained as a graph would have them, and their homes."""
    slots: list[ParameterSlot] = []
    homes: dict[int, Placement] = {}
    with no_torch_function():
        for unit in units:
            parameter = unit.parameter()
            if parameter is not None and parameter.requires_grad:
                slot = ParameterSlot.of(parameter, unit.name, index=_FIRST - len(slots))
                slots.append(dataclasses.replace(slot, tiles=tuple(unit.boxes)))
                homes[slot.index] = unit.placement
    return slots, homes
