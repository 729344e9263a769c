"""Memory that other graphs will take: for parameters that no graph has seen yet, and for what earlier graphs don't hold yet.

`budget` leaves room for both where homes are decided, so that caps hold for all graphs together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from zinf_compile._frames import callers
from zinf_compile._torch import PARAMETER_TYPES, no_torch_function
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.sizes import Sides
from zinf_compile.ir.tiers import Tier
from zinf_compile.plan.graph_plan import GraphMemory
from zinf_compile.plan.memory_model import MemoryModel, resident
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.units.unit import Unit

from .parameter import unit_of


def unseen_parameters(known: Iterable[object]) -> list[ParameterSlot]:
    """Return the parameters that aren't partitioned yet, of the modules whose methods are running, without the `known` ones.

    A graph break or a block compiled by itself is called by the module that has the others.
    """
    seen = {id(parameter) for parameter in known}
    found: list[ParameterSlot] = []
    with no_torch_function():
        for module in running_modules():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen and type(parameter) in PARAMETER_TYPES and unit_of(parameter) is None:
                    found.append(ParameterSlot.of(parameter, name, index=-1 - len(found)))
                seen.add(id(parameter))
    return [slot for slot in found if slot.numel and slot.device.type != "meta"]


def running_units() -> set[Unit]:
    """Return the units of the modules whose methods are running, as far as these are partitioned already."""
    with no_torch_function():
        found = (unit_of(parameter) for module in running_modules() for parameter in module.parameters())
        return {unit for unit in found if unit is not None}


def running_modules() -> list[nn.Module]:
    """Return the modules whose methods are running, the innermost first."""
    return [caller for caller in callers() if isinstance(caller, nn.Module)]


def bytes_beside(known: Iterable[object]) -> int:
    """Return the bytes of all other parameters of the modules whose methods are running, of partitioned ones as if whole."""
    seen, found = {id(parameter) for parameter in known}, 0
    with no_torch_function():
        for module in running_modules():
            for parameter in module.parameters():
                if id(parameter) not in seen:
                    found += format_of(parameter.dtype).bytes(parameter.numel())
                seen.add(id(parameter))
    return found


def transient_of_unseen(model: MemoryModel, slots: Iterable[ParameterSlot], bucket: int, *, tile: int | None) -> Sides:
    """Return the memory that graphs will need while they use these parameters: a few buckets, and the largest, in flight."""
    sizes = [(slot.bytes, slot.reduce_format.bytes(slot.numel) if slot.requires_grad else 0) for slot in slots]
    if not sizes:
        return Sides(0, 0)
    full, gradients = ([each[side] for each in sizes] for side in (0, 1))
    largest = [max(each) if tile is None else min(max(each), tile) for each in (full, gradients)]
    gathered, reduced = (min(sum(e), 4 * bucket + 2 * most) for e, most in zip((full, gradients), largest, strict=True))
    needs = GraphMemory(
        gathered=gathered,
        rows=0,
        largest="",
        narrowed=False,
        widening=1.0,
        cast=0,
        converted=0,
        left=reduced,
        reduced=reduced,
    )
    return model.transient(needs).least


def not_held_yet(context: Context, but: Collection[Unit]) -> Sides:
    """Return the bytes that units, without some, will have in memory and don't have yet: states and second gradients as well."""
    topology = context.link.topology
    parts: list[tuple[Tier, int, torch.dtype]] = []
    own: list[tuple[Tier, int, torch.dtype]] = []
    for unit in list(context.units):
        parameter = unit.parameter()
        row = (unit.placement.params, unit.shard_numel, unit.dtype)
        if unit in but or parameter is None:
            own += [row] * (parameter is not None)
            continue
        parts.append(row)
        parts.append((Tier.DEVICE, _copy_to_come(unit), unit.dtype))
        with no_torch_function():
            trained = parameter.requires_grad
        if trained:
            parts += [(unit.placement.grads, unit.gradient_numel, unit.reduce_dtype)] * 2
            parts += [(unit.placement.optimizer, unit.shard_numel, dtype) for dtype in states_of(unit)]
    to_come, known = resident(parts, topology), resident(own, topology)
    ledgers = (context.memory.ledger, context.memory.host_ledger)
    held = [sum(ledger.now()[kind] for kind in ("params", "grads", "states")) for ledger in ledgers]
    return Sides(max(0, to_come.device + known.device - held[0]), max(0, to_come.host + known.host - held[1]))


def copies_to_come(context: Context, but: Collection[Unit] = ()) -> int:
    """Return the bytes of full parameters that will stay on the device and aren't there now, without those of some units."""
    return sum(unit.format.bytes(_copy_to_come(unit)) for unit in list(context.units) if unit not in but)


def _copy_to_come(unit: Unit) -> int:
    """Return the elements of the full copy that will stay of a unit, and isn't there now."""
    return 0 if unit.context.full_copies.holds(unit) else unit.full_copy_numel


def states_of(unit: Unit) -> tuple[torch.dtype, ...]:
    """Return the types of Adam's states."""
    master = unit.placement.master_of(unit.dtype)
    kept = master or unit.dtype
    return (kept, kept) if master is None else (master, kept, kept)
