"""Parameters that earlier graphs planned for: a step updates them and those of the graphs to come in the same chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from zinf_compile._torch import no_torch_function
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.tiers import Placement
from zinf_compile.plan.memory_model import MemoryModel, step_chunk
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit

_FIRST = -(1 << 40)
"""Of indices that no graph's input has, nor a parameter that no graph has seen."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedParameters:
    """Those of some ranks that are trained, and their homes."""

    slots: Sequence[ParameterSlot] = ()
    homes: Mapping[int, Placement] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, context: Context, but: Collection[Unit]) -> PlannedParameters:
        """Return all but those of some units."""
        slots: list[ParameterSlot] = []
        homes: dict[int, Placement] = {}
        for unit in list(context.units):
            parameter = unit.parameter()
            if unit in but or parameter is None:
                continue
            with no_torch_function():
                trained = parameter.requires_grad
            if trained:
                slot = dataclasses.replace(
                    ParameterSlot.of(parameter, unit.name, index=_FIRST - len(slots)), tiles=tuple(unit.boxes)
                )
                slots.append(slot)
                homes[slot.index] = unit.placement
        return cls(slots, homes)

    def with_chunks(self, model: MemoryModel, slots: Sequence[ParameterSlot], placements: Placements) -> MemoryModel:
        """Return the model of parameters with these homes, with the chunks of a step over all of them."""
        if not self.slots:
            return model
        everywhere = Placements(placements.rest, {**placements.own, **self.homes})
        numel, chunk = step_chunk([*self.slots, *slots], everywhere, size=model.size, topology=model.topology)
        return dataclasses.replace(model, chunk_numel=numel, chunk=chunk)
