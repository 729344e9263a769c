"""Gather each partitioned unit in front of its uses."""

from __future__ import annotations

import dataclasses

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.passes.graph.alias import METADATA_OPS, derived_from
from zinf_compile.passes.graph.node_facts import parameters, slot_of


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """An operator and the units that it reads."""

    consumer: fx.Node
    units: tuple[fx.Node, ...]
    """Placeholders, in the order of the operator's arguments."""


def insert_gathers(gm: fx.GraphModule, *, keep_bytes: int) -> fx.GraphModule:
    """Insert gathers, and replace uses of hollow parameters by uses of gathered ones.

        before:  t = t(w);                                          a = addmm(b, x, t)
        after:   g = all_gather(b);  f = wait(g);  h = all_gather(w);  v = wait(h);  t = t(v);  a = addmm(f, x, t)

    A unit is gathered again for a later use if other units of more than `keep_bytes` are gathered in between; otherwise it is
    kept. So a tied embedding isn't live for the whole forward. Runs after `sink_unit_views`, which puts each consumer's views
    right in front of it.
    """
    graph = gm.graph
    derived = derived_from(node for node, _ in parameters(graph))
    uses = find_uses(graph, derived)
    gathered_at = choose_gathers([tuple(_slot(u) for u in use.units) for use in uses], keep_bytes=keep_bytes)
    gathered: dict[fx.Node, fx.Node] = {}
    for use, fresh in zip(uses, gathered_at, strict=True):
        own = _own_views(use.consumer, derived)
        first = own[0] if own else use.consumer
        for unit in use.units:
            if _slot(unit).key in fresh:
                gathered[unit] = _gather_before(graph, unit, first)
        for node in (*own, use.consumer):
            _read_full(node, gathered)
    return gm


def find_uses(graph: fx.Graph, derived: set[fx.Node]) -> list[Use]:
    """Return the operators that read parameters, in order."""
    uses = []
    for node in graph.nodes:
        if node in derived:
            continue
        units: dict[fx.Node, None] = {}
        for source in _compute_inputs(node, derived):
            for unit in _source_units(source, derived):
                units[unit] = None
        if units:
            uses.append(Use(node, tuple(units)))
    return uses


def choose_gathers(uses: list[tuple[ParameterSlot, ...]], *, keep_bytes: int) -> list[set[tuple[int, int]]]:
    """Decide which uses a unit is gathered for: return for each use the keys of the slots gathered in front of it."""
    fresh: list[set[tuple[int, int]]] = []
    last_seen: dict[tuple[int, int], int] = {}
    gathered_bytes = 0
    for units in uses:
        now: set[tuple[int, int]] = set()
        for slot in units:
            seen = last_seen.get(slot.key)
            if seen is None or gathered_bytes - seen > keep_bytes:
                now.add(slot.key)
                gathered_bytes += slot.bytes
            last_seen[slot.key] = gathered_bytes
        fresh.append(now)
    return fresh


def _compute_inputs(node: fx.Node, derived: set[fx.Node]) -> list[fx.Node]:
    if node.target is ops.reduce_scatter:
        return [node.args[0]]  # type: ignore[list-item]  # names the unit and doesn't read it
    if node.target is ops.gather_rows:
        return [node.args[1]]  # type: ignore[list-item]  # fetches rows of the unit itself
    if node.op == "output" or node.target in METADATA_OPS:
        return [source for source in node.all_input_nodes if source in derived]  # may read a hollow parameter
    return node.all_input_nodes


def _read_full(node: fx.Node, gathered: dict[fx.Node, fx.Node]) -> None:
    def full(source: fx.Node) -> fx.Node:
        return gathered.get(source, source)

    if node.target is ops.reduce_scatter:
        node.args = (fx.map_arg(node.args[0], full), *node.args[1:])
    elif node.target is ops.gather_rows:
        node.args = (node.args[0], fx.map_arg(node.args[1], full), *node.args[2:])
    elif node.op != "output":
        node.args, node.kwargs = fx.map_arg(node.args, full), fx.map_arg(node.kwargs, full)


def _source_units(source: fx.Node, derived: set[fx.Node]) -> list[fx.Node]:
    if slot_of(source) is not None:
        return [source]
    if source not in derived:
        return []
    return [unit for node in source.all_input_nodes for unit in _source_units(node, derived)]


def _own_views(consumer: fx.Node, derived: set[fx.Node]) -> list[fx.Node]:
    own: list[fx.Node] = []
    node = consumer.prev
    while node in derived:
        own.append(node)
        node = node.prev
    return own[::-1]


def _gather_before(graph: fx.Graph, unit: fx.Node, place: fx.Node) -> fx.Node:
    with graph.inserting_before(place):
        handle = graph.create_node("call_function", ops.all_gather, (unit, LONE_GROUP), name="gather")
        full = graph.create_node("call_function", ops.wait, (handle,), name="full")
    handle.meta["val"] = full.meta["val"] = unit.meta["val"]
    return full


def _slot(unit: fx.Node) -> ParameterSlot:
    slot = slot_of(unit)
    assert slot is not None
    return slot
