"""Compute of a forward that can run a second time with the same results, and what it reads. `plan_remade` calls it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.forward_compute import Compute
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.ir.random_states import has_state
from zinf_compile.passes.graph.alias import memory_of
from zinf_compile.passes.graph.boundary import SizeInputs, boundary_of
from zinf_compile.passes.graph.node_facts import slot_behind, tile_of

from .stretches import Stretches

aten = torch.ops.aten

_NAMESPACES = frozenset({"aten", "prims", "zinf", "zinf_compute"})
"""Libraries whose operators compute the same from the same inputs, and do nothing else. Nothing is known of a user's."""

_SUMS = frozenset({aten.addmm.default, aten.baddbmm.default})
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, *_SUMS})
"""A sum that begins with a product may be written into the product's memory, depending on who reads that."""


class ForwardCompute:
    """The compute of a forward whose gathers are just in time, by what is compiled as one."""

    def __init__(self, graph: fx.Graph, *, known: Collection[str] | None = None) -> None:
        """`known`: the values that a backward can have, by name; None: all."""
        self._known = known
        self.nodes: Sequence[Sequence[fx.Node]] = Stretches(graph).nodes
        self._sizes = SizeInputs([node for node in graph.nodes if node.op == "placeholder"])
        self._stretch_of = {node: number for number, nodes in enumerate(self.nodes) for node in nodes}
        self._of_tiles = {number for number, nodes in enumerate(self.nodes) if any(map(_is_of_tile, self.inputs_of(number)))}

    def inputs_of(self, number: int) -> list[fx.Node]:
        """Return what it reads: placeholders, gathered units, values that others have made."""
        inputs, _ = boundary_of(self.nodes[number])
        return inputs + self._sizes.missing(inputs)

    def describe(self) -> list[Compute]:
        """Return it as `choose_remake` takes it."""
        return [self._describe(number) for number in range(len(self.nodes))]

    def _describe(self, number: int) -> Compute:
        nodes, inputs = self.nodes[number], self.inputs_of(number)
        units = [slot_behind(node).name for node in inputs if node.target is ops.wait]
        return Compute(
            unit=units[0] if units else "",
            reads=frozenset(node.name for node in inputs if node.op == "call_function" and node.target is not ops.wait),
            makes=frozenset(node.name for node in nodes),
            repeatable=self._is_repeatable(number, inputs),
            reads_others=len(units) > 1,
        )

    def _is_repeatable(self, number: int, inputs: Iterable[fx.Node]) -> bool:
        beside = {self._stretch_of.get(node) for node in inputs} | {number}
        if beside & self._of_tiles or not all(map(_may_be_carried, inputs)):
            return False
        values = {node.name for node in inputs if node.target is not ops.wait}
        if self._known is not None and not values <= set(self._known):
            return False
        _, drawn_on = random_devices(self.nodes[number])
        return all(map(_repeats, self.nodes[number])) and all(map(has_state, drawn_on))


def random_devices(nodes: Iterable[fx.Node]) -> tuple[str, tuple[str, ...]]:
    """Return the first of these operators that may draw random numbers, and the devices whose generators they all draw from."""
    found: dict[str, None] = {}
    first = ""
    for node in filter(_draws, nodes):
        first = first or node.name
        value = node.meta.get("val")
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                found[str(each.device)] = None
    return first, tuple(found)


def memories_of(nodes: Iterable[fx.Node]) -> Mapping[str, str]:
    """Return for each value the one whose memory it lies in, by name; itself where that is unknown."""
    return {node.name: (memory_of(node) or node).name for node in nodes}


def _is_of_tile(node: fx.Node) -> bool:
    if node.target is ops.wait:
        return slot_behind(node).tile is not None
    return tile_of(node) is not None


def _may_be_carried(node: fx.Node) -> bool:
    """Return whether a backward can have an input of the forward's compute: a unit, or a value that is not a view of one."""
    if node.target is ops.wait or node.op == "placeholder":
        return True
    memory = memory_of(node)
    if memory is None or memory.target in SCHEDULE_OPS - {ops.gather_rows}:
        return False
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, torch.SymInt)) and not (
        isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_quantized)
    )


def _draws(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    places = {argument.name: place for place, argument in enumerate(target._schema.arguments)}
    place = places.get("dropout_p")  # of attention, which draws nothing without
    if place is None:
        return True
    given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _repeats(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):  # of numbers, or an item of several results; else of a higher order
        return not isinstance(target, torch._ops.HigherOrderOperator) and callable(target)
    if target.namespace not in _NAMESPACES or target._schema.is_mutable or node.kwargs.get("generator") is not None:
        return False
    first = node.args[0] if node.args else None
    return not (target in _SUMS and isinstance(first, fx.Node) and first.target in _PRODUCTS)
