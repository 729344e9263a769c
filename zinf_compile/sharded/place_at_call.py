"""Homes of parameters that a compiled graph first sees at a call, in the place of those that it was compiled with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zinf_compile.config import Config
from zinf_compile.ir.placements import Placements
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import Sides
from zinf_compile.plan.memory_model import model_memory
from zinf_compile.runtime.context import Context

from .caps import find_caps
from .other_graphs import not_held_yet, running_units, unseen_parameters
from .planned_parameters import PlannedParameters
from .short_ranks import least_of_ranks


def place_at_call(
    config: Config, placements: Placements, context: Context, slots: Sequence[ParameterSlot], parameters: Sequence[Any]
) -> Placements:
    """Return the homes that the graph was compiled for if all ranks have room for them, else the farthest. Collective.

    Room is left for parameters that no graph has seen yet, for what others don't hold yet, and for graphs while they run.
    """
    memory, topology = context.memory, context.link.topology
    unseen = unseen_parameters(parameters)
    own, size = [*slots, *unseen], context.ranks.shard_group.size
    planned = PlannedParameters.of(context, (), running=running_units(), size=size)  # in the chunks of which a step has them
    model = planned.with_chunks(model_memory(own, placements, size=size, topology=topology), own, placements)
    whole = sum(slot.bytes for slot in (*slots, *unseen))
    caps = find_caps(config, context, held=whole + memory.ledger.total()[0])
    reservations = memory.reservations
    ahead = Sides(*(((reservations.chunk_buffers or 1) - 1) * each for each in model.chunk))  # chunks that plans have room for
    chunks = planned.chunk_to_come(model).plus(ahead)
    needed = model.resident.plus(model.added_by_steps).plus(chunks).plus(not_held_yet(context, ()))
    device_cap = caps.on_device(topology)
    passing = reservations.passing_within(Sides(device_cap, caps.host))
    rows = [
        (device_cap, memory.ledger, passing.device, needed.device),
        (caps.host, memory.host_ledger, passing.host, needed.host),
    ]
    sides = rows if topology.host_apart else rows[:1]
    fits = all(ledger.total()[0] + passing + more <= cap for cap, ledger, passing, more in sides)
    if context.size > 1:
        fits = bool(least_of_ranks(context, int(fits), what="room for parameters at their homes"))
    return placements if fits else Placements(placements.rest)
