"""Units that a forward gathers and its backward would gather again: what `plan/kept_units` chooses from, right after the cut."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.graph.alias import METADATA_OPS, derived_from
from zinf_compile.passes.graph.node_facts import parameters, positions
from zinf_compile.passes.graph.unit_casts import UnitUses, find_unit_uses, narrower_type

_LOOKUPS = frozenset({ops.tile, ops.gather_rows})


@dataclasses.dataclass(frozen=True, slots=True)
class KeepableUnit:
    """A parameter that both graphs of a pair gather as a whole, in one data type."""

    name: str
    """Of its placeholder in both graphs."""
    slot: ParameterSlot
    dtype: torch.dtype
    """In which both graphs gather it."""
    last: int
    """The place of its last reader in the forward."""

    @property
    def bytes(self) -> int:
        """Return the bytes that the full unit takes in that type."""
        return format_of(self.dtype).bytes(self.slot.numel)


def find_keepable(forward: fx.Graph, backward: fx.Graph) -> tuple[KeepableUnit, ...]:
    """Return the units that may stay gathered from a forward to its backward, in the order of their last use in the forward.

    Both graphs are right from the cut. Left out are parameters in tiles, those of which single rows are gathered, and those that
    the two graphs gather in different types.
    """
    place = positions(forward)
    reading = {slot.key: unit for unit, slot in parameters(backward)}
    found = []
    for unit, slot in parameters(forward):
        again = reading.get(slot.key)
        if again is None or again.name != unit.name:
            continue
        ahead, back = find_unit_uses(unit), find_unit_uses(again)
        others, others_back = reading_units(ahead, unit), reading_units(back, again)
        last = last_reader(unit, place)
        looked_up = any(user.target in _LOOKUPS for user in (*unit.users, *again.users))
        if last is None or looked_up or not (back.casts or others_back):
            continue
        dtype = _gathered_in(slot, ahead.casts, others)
        if dtype == _gathered_in(slot, back.casts, others_back):
            found.append(KeepableUnit(unit.name, slot, dtype, place[last]))
    return tuple(sorted(found, key=lambda each: each.last))


def last_reader(unit: fx.Node, place: dict[fx.Node, int]) -> fx.Node | None:
    """Return the last operator that reads a parameter, or a view or cast of it; None where none does."""
    derived = derived_from([unit])
    known = {unit, *derived}
    readers = [user for node in known for user in node.users if user not in derived and _reads(user, known)]
    return max(readers, key=place.__getitem__, default=None)


def reading_units(uses: UnitUses, unit: fx.Node) -> list[fx.Node]:
    """Return the users beside casts that read elements of a parameter."""
    known = {unit, *uses.views}
    return [user for user in uses.others if _reads(user, known)]


def _reads(user: fx.Node, unit: set[fx.Node]) -> bool:
    if user.op == "output" or user.target in METADATA_OPS:
        return False
    return user.target is not ops.reduce_scatter or user.args[0] in unit  # which names the unit besides


def _gathered_in(slot: ParameterSlot, casts: tuple[fx.Node, ...], others: list[fx.Node]) -> torch.dtype:
    """Return the type in which `narrow_gathers` will gather a unit with these uses."""
    return (None if others else narrower_type(slot.dtype, casts)) or slot.dtype
