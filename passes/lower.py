"""Lower a scheduled graph to a program: transfers become steps, and the compute between them becomes regions.

The backend calls `lower` for each graph. It knows no runtime: `compile_region` and the steps of the `OpSpec` rows come from
outside.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from zinf_compile._torch import BoxedCodeGen, is_boxed
from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import LONE_GROUP, SCHEDULE_OPS, SPECS, OpSpec, has_unit, position_of
from zinf_compile.ir.program import Program, SlotKey, tiers_of_gradients
from zinf_compile.ir.steps import GradAlias, Issued, Region, Step
from zinf_compile.passes.analysis.region_facts import place_of
from zinf_compile.passes.graph.alias import alias_closure, aliased_inputs
from zinf_compile.passes.graph.boundary import SizeInputs, boundary_of
from zinf_compile.passes.graph.found_units import is_found
from zinf_compile.passes.graph.node_facts import (
    argument_of,
    buffer_of,
    fake_value,
    group_of,
    is_collective,
    joined_outputs,
    leaving,
    positions,
    slot_behind,
    slot_of,
    starts_region,
    tile_of,
    values_behind,
    wire_type,
)
from zinf_compile.passes.graph.remade import runs_again
from zinf_compile.passes.graph.token_loop import is_token_loop

_Segment = list[fx.Node]
"""Consecutive operators that become one step."""

RegionCompiler = Callable[[fx.GraphModule], Callable[[list[Any]], Sequence[Any]]]
"""Compiles a region. The result takes a list of values, empties it and returns a tuple, as the region's own code does.
Placeholders carry fake values."""


def run_by_operator(region: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Return a callable that runs a region operator by operator, with the kernels of eager PyTorch.

    It keeps the generated code, and the graph only where the region reads constants.
    """
    if not is_boxed(region.graph):
        region.graph.set_codegen(BoxedCodeGen())
        region.recompile()
    if any(node.op == "get_attr" for node in region.graph.nodes):
        forward: Callable[[list[Any]], Sequence[Any]] = region.forward
        return forward
    return partial(type(region).forward, None)  # frees the graph: a parameter of a thousand tiles has as many regions


def lower(gm: fx.GraphModule, *, name: str, compile_region: RegionCompiler = run_by_operator) -> Program:
    """Lower `gm` to a program: each transfer becomes a step, the compute between two of them a region for `compile_region`."""
    register: dict[fx.Node, int] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        register[node] = len(register)
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    aliases, sizes = _GradAliases(gm.graph), SizeInputs(placeholders)
    steps: list[Step] = []
    marks = 0
    for spec, nodes in _segments(gm.graph):
        if spec is None:
            inputs, outputs = boundary_of(nodes)
            inputs += sizes.missing(inputs)
            for node in outputs:
                register[node] = len(register)
            marks += sum(map(starts_region, nodes))
            fn = compile_region(_region_graph(gm, nodes, inputs, outputs))
            reads, writes = tuple(register[n] for n in inputs), tuple(register[n] for n in outputs)
            name_ = place_of(nodes) + (" again" if runs_again(nodes[0]) else "")
            steps.append(Region(fn, reads, writes, max(0, marks - 1), name_))
            continue
        for node in nodes:
            if _gives_result(node):
                register[node] = len(register)
        assert spec.step is not None
        steps.append(spec.step([_issued(node, register, aliases) for node in nodes]))
    by_name = {node.name: node for node in placeholders}
    tiles = {node: by_name[unit] for node in placeholders if (unit := tile_of(node)) is not None}
    tiles_ = {register[node]: (register[unit], _number(node)) for node, unit in tiles.items()}
    slots = {register[n]: slot for n in placeholders if (slot := slot_of(n)) is not None and n not in tiles}
    results = output.args[0]
    assert isinstance(results, (list, tuple)), "a graph returns a tuple of values"
    constants: dict[int, Any] = {}
    outputs_: list[int | None] = []
    for result in results:
        if result is None:
            outputs_.append(None)
        elif isinstance(result, fx.Node) and result.op != "get_attr":
            outputs_.append(register[result])
        else:
            fixed = operator.attrgetter(str(result.target))(gm) if isinstance(result, fx.Node) else result
            constants[len(register) + len(constants)] = fixed
            outputs_.append(len(register) + len(constants) - 1)
    places = {slot.key: register[n] for n in placeholders if (slot := slot_of(n)) is not None}
    gathers = [node for node in gm.graph.nodes if node.target is ops.all_gather]
    return Program(
        name=name,
        registers=len(register) + len(constants),
        inputs=len(placeholders) - len(tiles),
        slots=slots,
        tiles=tiles_,
        buffers={register[n]: buffer for n in placeholders if (buffer := buffer_of(n)) is not None},
        constants=constants,
        steps=tuple(steps),
        frees=_frees(steps, {r for r in outputs_ if r is not None}),
        outputs=tuple(_with_tiles(outputs_, joined_outputs(gm))),
        leaves=tiers_of_gradients(steps, tiles_),
        sequence=collective_sequence(gm.graph),
        kept=frozenset(register[gather] for gather in _kept_gathers(gm.graph)),
        ends=_last_units(gm.graph, register, places),
        finds=_found_units(gm.graph),
        finds_planned=frozenset((slot_behind(n).key, slot_behind(n).dtype) for n in gathers if is_found(n)),
        last_gathers={register[node]: places[key] for key, node in {slot_behind(n).key: n for n in gathers}.items()},
        leaving=tuple((memory.tier, 0 if memory.dynamic else memory.bytes) for memory in leaving(gm)),
    )


def _kept_gathers(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the gathers of units that are kept for the backward in the memory that they are gathered into."""
    for node in graph.nodes:
        if node.target is ops.keep_for_backward and (full := node.all_input_nodes[0]).target is ops.wait:
            yield full.all_input_nodes[0]


def _last_units(graph: fx.Graph, register: Mapping[fx.Node, int], places: Mapping[SlotKey, int]) -> dict[int, int]:
    """Return the registers of full units that are released behind all compute, with those of their parameters."""
    found = {}
    for node in itertools.takewhile(_is_no_compute, reversed(graph.nodes)):
        if node.target is ops.release:
            found[register[node.all_input_nodes[0]]] = places[slot_behind(node).key]
    return found


def _found_units(graph: fx.Graph) -> frozenset[tuple[SlotKey, torch.dtype]]:
    """Return the slots whose full units are awaited before any compute, or marked as found; with the types of their gathers."""
    waits = [node for node in graph.nodes if node.target is ops.wait]
    first = set(itertools.takewhile(_is_no_compute, graph.nodes)).intersection(waits)
    found = (node for node in waits if node in first or is_found(node.all_input_nodes[0]))
    return frozenset((slot_behind(node).key, fake_value(node).dtype) for node in found)


def _is_no_compute(node: fx.Node) -> bool:
    return node.op != "call_function" or node.target in SCHEDULE_OPS


def _number(tile: fx.Node) -> int:
    slot = slot_of(tile)
    assert slot is not None
    assert slot.tile is not None
    return slot.tile


def _with_tiles(outputs: list[int | None], joined: Mapping[int, tuple[int, ...]]) -> list[int | tuple[int, ...] | None]:
    """Join the outputs that are tiles of one gradient. Outputs after the graph's own are tiles only."""
    own = len(outputs) - sum(len(parts) - 1 for parts in joined.values())
    merged: list[int | tuple[int, ...] | None] = []
    for position, register in enumerate(outputs[:own]):
        parts = [outputs[part] for part in joined.get(position, ())]
        merged.append(tuple(part for part in parts if part is not None) or register)
    return merged


def collective_sequence(graph: fx.Graph) -> tuple[str, ...]:
    """Return the collectives in order, one line each: kind, group, parameter, elements, type, and the type on the wire."""
    return tuple(
        f"{_called(node)}: {slot_behind(node).name} [{', '.join(map(str, slot_behind(node).shape))}] {_types(node)}"
        for node in graph.nodes
        if is_collective(node)
    )


def _called(node: fx.Node) -> str:
    name = SPECS[node.target].name
    return name if position_of(node.target, "group") is None else f"{name} group {group_of(node)}"


def _types(node: fx.Node) -> str:
    own, wire = (str(dtype).removeprefix("torch.") for dtype in (slot_behind(node).dtype, wire_type(node)))
    return own if wire == own else f"{own} as {wire}"


def _segments(graph: fx.Graph) -> Iterator[tuple[OpSpec | None, _Segment]]:
    """Yield the operators of each step: (None, compute), or (the `OpSpec` of a transfer, its members)."""
    current: _Segment = []
    current_spec: OpSpec | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        spec = SPECS.get(node.target)
        if spec is not None and spec.step is None:
            spec = None
        extends = spec is current_spec and (
            not _begins(node, current) if spec is None else bool(current) and _joins(node, current[-1])
        )
        if current and not extends:
            yield current_spec, current
            current = []
        current.append(node)
        current_spec = spec
    if current:
        yield current_spec, current


def _begins(node: fx.Node, current: _Segment) -> bool:
    """Return whether compute begins another step here. A loop over slices of tokens is one, with the results taken from it."""
    if starts_region(node) or is_token_loop(node):
        return True
    return bool(current) and is_token_loop(current[0]) and not is_token_loop(node.args[0] if node.args else None)


def _joins(node: fx.Node, previous: fx.Node) -> bool:
    """Return whether a transfer is issued with the one before it: same group, same hop. A gradient's is that of its reduction."""
    hops = [(argument_of(n, "src"), argument_of(n, "dst")) for n in (node, previous)]
    return group_of(_grouped(node)) == group_of(_grouped(previous)) != LONE_GROUP and hops[0] == hops[1]


def _grouped(node: fx.Node) -> fx.Node:
    """Return the transfer that says the group: for a swap of a gradient its reduction."""
    while node.target is ops.swap_out:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _issued(node: fx.Node, register: Mapping[fx.Node, int], aliases: _GradAliases) -> Issued:
    given = {a.name: a.default_value for a in node.target._schema.arguments}  # type: ignore[union-attr]
    given.update(zip(given, node.args, strict=False), **node.kwargs)
    args = {name: _with_registers(value, register) for name, value in given.items()}
    values = values_behind(node)
    dtype = wire_type(node) if has_unit(node.target) else fake_value(values[0] if values else node).dtype
    return Issued(args, register.get(node, -1), dtype, partial(aliases.of, node))


def _with_registers(value: object, register: Mapping[fx.Node, int]) -> object:
    if isinstance(value, (list, tuple)):
        return [_with_registers(item, register) for item in value]
    return register[value] if isinstance(value, fx.Node) else value


def _gives_result(node: fx.Node) -> bool:
    return bool(node.target._schema.returns)  # type: ignore[union-attr]


class _GradAliases:
    """Aliases of the gradients that reduce-scatters read: whether another operator or the caller sees their memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._positions = positions(graph)
        self._end = len(self._positions) - 1  # position of the output
        self._last: dict[fx.Node, int] = {}  # keyed by the value that owns the memory: gradients may be slices of one

    def of(self, reduction: fx.Node) -> GradAlias:
        """Return the aliasing of the gradient that `reduction` reads."""
        root = reduction.args[0]
        assert isinstance(root, fx.Node)
        while inputs := aliased_inputs(root):
            if len(inputs) > 1:
                return GradAlias.CALLER
            root = inputs[0]
        if root not in self._last:
            self._last[root] = max(self._positions[user] for node in alias_closure(root) for user in node.users)
        if root.op != "call_function" or self._last[root] == self._end:
            return GradAlias.CALLER
        return GradAlias.NOBODY if self._last[root] <= self._positions[reduction] else GradAlias.GRAPH


def _region_graph(gm: fx.GraphModule, nodes: _Segment, inputs: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in copies:
                copies[source] = graph.get_attr(str(source.target))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph.set_codegen(BoxedCodeGen())  # or its code is generated twice where it runs by operator
    return fx.GraphModule(gm, graph)


def _frees(steps: list[Step], kept: set[int]) -> tuple[tuple[int, ...], ...]:
    frees: list[tuple[int, ...]] = []
    seen = set(kept)
    for step in reversed(steps):
        last = [r for r in dict.fromkeys(step.reads) if r not in seen]
        unread = [r for r in step.writes if r not in seen]
        seen.update(last)
        frees.append((*last, *unread))
    return tuple(reversed(frees))
