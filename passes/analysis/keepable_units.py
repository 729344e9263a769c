"""Units that a forward gathers and its backward would gather again: what `plan/kept_units` chooses from, right after the cut."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.formats import format_of
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.graph.alias import METADATA_OPS, derived_from
from zinf_compile.passes.graph.node_facts import fake_value, parameters, positions
from zinf_compile.passes.graph.unit_casts import find_unit_uses, narrower_type


@dataclasses.dataclass(frozen=True, slots=True)
class KeepableUnit:
    """A parameter that both graphs of a pair gather as a whole."""

    name: str
    """Of its placeholder in both graphs."""
    slot: ParameterSlot
    dtype: torch.dtype
    """In which the backward gathers it, and the forward for its last reader."""
    last: int
    """The place of its last reader in the forward."""

    @property
    def bytes(self) -> int:
        """Return the bytes that the full unit takes in that type."""
        return format_of(self.dtype).bytes(self.slot.numel)


def find_keepable(forward: fx.Graph, backward: fx.Graph) -> tuple[KeepableUnit, ...]:
    """Return the units that may stay gathered from a forward to its backward, in the order of their last use in the forward.

    Both graphs are right from the cut. Left out are parameters in tiles, those of which nothing but single rows is gathered, and
    those that the forward gathers at last in another type than the backward.
    """
    place = positions(forward)
    reading = {slot.key: unit for unit, slot in parameters(backward)}
    found = []
    for unit, slot in parameters(forward):
        again = reading.get(slot.key)
        if again is None or again.name != unit.name or any(user.target is ops.tile for user in (*unit.users, *again.users)):
            continue
        ahead, back = readers_of(unit), readers_of(again)
        if not ahead or not back:
            continue
        dtype = _gathered_in(slot, again)
        last = max(ahead, key=place.__getitem__)
        if ahead[last] == {dtype}:
            found.append(KeepableUnit(unit.name, slot, dtype, place[last]))
    return tuple(sorted(found, key=lambda each: each.last))


def readers_of(unit: fx.Node) -> dict[fx.Node, set[torch.dtype]]:
    """Return the operators that read a parameter, or views or casts of it, each with the types in which they do."""
    derived = derived_from([unit])
    known = {unit, *derived}
    found: dict[fx.Node, set[torch.dtype]] = {}
    for node in known:
        for user in node.users:
            if user not in derived and _reads(user, known):
                found.setdefault(user, set()).add(fake_value(node).dtype)
    return found


def _reads(user: fx.Node, unit: set[fx.Node]) -> bool:
    if user.op == "output" or user.target in METADATA_OPS or user.target is ops.gather_rows:
        return False
    return user.target is not ops.reduce_scatter or user.args[0] in unit  # which names the unit besides


def _gathered_in(slot: ParameterSlot, unit: fx.Node) -> torch.dtype:
    """Return the type in which `narrow_gathers` will gather a unit of a backward."""
    uses = find_unit_uses(unit)
    known = {unit, *uses.views}
    others = [user for user in uses.others if _reads(user, known)]
    return (None if others else narrower_type(slot.dtype, uses.casts)) or slot.dtype
