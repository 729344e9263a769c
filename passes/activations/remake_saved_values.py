"""Make saved values again in the backward that the forward has dropped, by the forward's own compute."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.analysis.stretches import Stretches
from zinf_compile.passes.graph.boundary import boundary_of
from zinf_compile.passes.graph.node_facts import group_of, mark_region, positions, slot_behind, wire_type
from zinf_compile.passes.graph.remade import Remade, RemadeBlock, mark_again, remaking


def remake_saved_values(gm: fx.GraphModule) -> fx.GraphModule:
    """Run compute of the forward again in front of the first compute that reads what it makes.

        before:  g = all_gather(u);  f = wait(g);  a = mm(x, f);  release(f)
                 h = all_gather(w);  v = wait(h);  b = mul(a, r);  c = mm(b, v);  release(v);  return (c,)
        after:   g = all_gather(u);  f = wait(g);  a = mm(x, f);  release(f)
                 h = all_gather(w);  v = wait(h);  k = all_gather(z, 0);  q = wait(k)
                 m = addmm(q, x, v);  p = relu(m);  release(q)
                 b = mul(a, p);  c = mm(b, v);  release(v);  return (c,)

    The parameters that it reads are gathered in front of it, where they aren't for the compute behind it anyway. What is compiled
    as one in the forward is so here, with the same results, used or not: it is the same code. Compute that draws random numbers
    finds the generator's state of then, and leaves that of now.
    """
    remade = remaking(gm)
    if remade is not None:
        _Remaking(gm, remade).run()
    return gm


@dataclasses.dataclass(frozen=True, slots=True)
class _Unit:
    """A gathered unit as it can be read somewhere."""

    full: fx.Node
    release: fx.Node


class _Remaking:
    def __init__(self, gm: fx.GraphModule, remade: Remade) -> None:
        self._gm, self._graph, self._remade = gm, gm.graph, remade
        self._inputs = {node.name: node for node in self._graph.nodes if node.op == "placeholder"}
        self._stretches, self._place = Stretches(self._graph), positions(self._graph)
        self._gathered = [
            _Unit(node, user)
            for node in self._graph.nodes
            if node.target is ops.wait
            for user in node.users
            if user.target is ops.release
        ]
        self._group = max((group_of(node) for node in self._graph.nodes if node.target is ops.all_gather), default=-1) + 1
        self._results = {node for node in returned(remade.forward) if isinstance(node, fx.Node)}

    def run(self) -> None:
        for block in reversed(self._remade.blocks):
            readers = [user for name in block.dropped for user in self._inputs[name].users]
            if readers:
                self._run_again(block, min(readers, key=self._place.__getitem__))

    def _run_again(self, block: RemadeBlock, reader: fx.Node) -> None:
        number = self._stretches.of(reader)
        before = self._stretches.nodes[number][0] if self._stretches.contains(reader) else reader
        if self._stretches.contains(reader):
            mark_region(before)  # what runs again in front of it isn't compiled with it
        here = {
            _key(unit.full): unit.full
            for unit in self._gathered
            if self._place[unit.full] < self._place[before] < self._place[unit.release]
        }
        made: dict[fx.Node, fx.Node] = {}
        for nodes in block.compute:
            self._run_compute(nodes, made, here, before)
        by_name = {source.name: node for source, node in made.items()}
        for name in block.dropped:
            self._inputs[name].replace_all_uses_with(by_name[name])

    def _run_compute(
        self, nodes: Sequence[fx.Node], made: dict[fx.Node, fx.Node], here: Mapping[object, fx.Node], before: fx.Node
    ) -> None:
        """Put one compiled stretch of the forward before a node; `made` are values by the forward's nodes."""
        inputs, results = boundary_of(nodes)
        known = {full: here[_key(full)] for full in inputs if full.target is ops.wait and _key(full) in here}
        fresh = self._gather([full for full in inputs if full.target is ops.wait and full not in known], before)
        known.update(fresh)
        for source in inputs:
            if source not in known:
                known[source] = made[source] if source in made else self._inputs[self._remade.carried[source.name]]
        states = next((self._remade.states[node.name] for node in nodes if node.name in self._remade.states), {})
        with self._graph.inserting_before(before):
            later = {device: self._set_state(self._inputs[name], device) for device, name in states.items()}
            for node in nodes:
                for source in node.all_input_nodes:
                    if source.op == "get_attr" and source not in known:
                        known[source] = self._constant(source)
                args, kwargs = fx.map_arg(node.args, known.__getitem__), fx.map_arg(node.kwargs, known.__getitem__)
                again = self._graph.create_node(node.op, node.target, args, kwargs, f"{node.name}_again")
                again.meta = dict(node.meta)
                mark_again(again, is_result=node in results)
                known[node] = made[node] = again
            mark_region(made[nodes[0]])
            for device, state in later.items():
                self._set_state(state, device)
            for full in fresh.values():
                self._graph.call_function(ops.release, (full,))

    def _gather(self, fulls: Sequence[fx.Node], before: fx.Node) -> dict[fx.Node, fx.Node]:
        """Gather the units behind the forward's waits, those of one type together."""
        graph, handles = self._graph, {}
        by_type: dict[torch.dtype, list[fx.Node]] = {}
        for full in fulls:
            by_type.setdefault(wire_type(full), []).append(full)
        with graph.inserting_before(before):
            for members in by_type.values():
                for full in members:
                    (gather,) = full.all_input_nodes
                    unit = self._inputs[gather.all_input_nodes[0].name]
                    handles[full] = graph.create_node(
                        "call_function", ops.all_gather, (unit, self._group), gather.kwargs, "gather"
                    )
                    handles[full].meta["val"] = gather.meta["val"]
                self._group += 1
            waits = {}
            for full in fulls:
                waits[full] = graph.create_node("call_function", ops.wait, (handles[full],), name="full")
                waits[full].meta["val"] = full.meta["val"]
        return waits

    def _set_state(self, state: fx.Node, device: str) -> fx.Node:
        node = self._graph.create_node("call_function", ops.set_random_state, (state, device), name="random_before")
        node.meta["val"] = state.meta["val"]
        return node

    def _constant(self, source: fx.Node) -> fx.Node:
        """Return a constant of the forward's. Both modules have those of the joint graph by the same names, if they use them."""
        name = str(source.target)
        if not hasattr(self._gm, name):
            setattr(self._gm, name, operator.attrgetter(name)(self._remade.forward.owning_module))
        node = self._graph.create_node("get_attr", name)
        node.meta = dict(source.meta)
        return node


def _key(full: fx.Node) -> object:
    return slot_behind(full).key, wire_type(full)
