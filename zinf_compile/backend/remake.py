"""What can be dropped and made again in a backward, right after the cut; both graphs are given what a share of that takes.

`graph_compiler` calls it where option activations="recompute" says that all is, `decide_memory` for shares that it weighs.
`plan/recompute` chooses, the passes of `passes/activations` act.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from zinf_compile._torch import aot_index, mutated_inputs
from zinf_compile.ir import ops
from zinf_compile.ir.forward_compute import Remake
from zinf_compile.ir.saved_memory import RECOMPUTE, SavedMemory
from zinf_compile.passes import just_in_time
from zinf_compile.passes.activations.carry_values import carry_values
from zinf_compile.passes.analysis.region_facts import bytes_of_value
from zinf_compile.passes.analysis.repeatable import ForwardCompute, memories_of, random_devices
from zinf_compile.passes.analysis.saved_memories import find_memories, returned
from zinf_compile.passes.analysis.stretches import Stretches
from zinf_compile.passes.graph.alias import memory_of
from zinf_compile.passes.graph.node_facts import buffer_of, positions, slot_of
from zinf_compile.passes.graph.region_structure import structure
from zinf_compile.passes.graph.remade import Remade, RemadeBlock, mark_remade, runs_again
from zinf_compile.passes.lower import RegionCompiler
from zinf_compile.plan.recompute import choose_remake, first_blocks

Function = Callable[[list[Any]], Sequence[Any]]

LEAST_BUFFER_BYTES = 1 << 20
"""Buffers of the model of more aren't copied: where one changes before the backward, PyTorch raises its error."""


class Remakable:
    """What the backward of a pair of graphs could make again: blocks, which `plan/recompute` finds by their structure."""

    def __init__(self, forward: fx.GraphModule, backward: fx.GraphModule, *, bucket_bytes: int, own_outputs: int) -> None:
        """`own_outputs` of the forward are the user's. Both graphs are right from the cut."""
        self._own_outputs = own_outputs
        self._source = just_in_time(forward, bucket_bytes)
        self._compute = ForwardCompute(self._source.graph, known={node.name for node in forward.graph.nodes})
        self._described = self._compute.describe()
        saved = _saved(forward, backward, bucket_bytes, own_outputs)
        self._all = choose_remake(self._described, saved, memories_of(self._source.graph.nodes))

    @property
    def blocks(self) -> int:
        """The number of blocks that could run again."""
        return len(self._all.blocks)

    def compute_of(self, blocks: int) -> list[Sequence[fx.Node]]:
        """Return the forward's compute that runs again where the first blocks do."""
        return [self._compute.nodes[number] for block in self._all.blocks[:blocks] for number in block]

    def plan(self, forward: fx.GraphModule, backward: fx.GraphModule, blocks: int) -> None:
        """Let the first blocks run again: give the backward what they are made from, and mark them in both graphs.

        The graphs are those of the cut, or copies of them.
        """
        remake = first_blocks(self._all, self._described, blocks)
        if not remake.blocks:
            return
        compute = self._compute
        numbers = [number for block in remake.blocks for number in block]
        inputs = {node.name for number in numbers for node in compute.inputs_of(number) if node.op == "placeholder"}
        gathered = {node for number in numbers for node in compute.inputs_of(number) if node.target is ops.wait}
        wanted = inputs | {_unit_behind(full).name for full in gathered} | remake.kept
        copies = _held_by_callers(forward.graph, backward.graph, wanted, self._own_outputs)
        found = (random_devices(compute.nodes[number]) for number in numbers)
        draws = [(name, device) for name, devices in found for device in devices]
        order = [node.name for node in forward.graph.nodes if node.name in wanted]
        carried, states = carry_values(
            forward,
            backward=backward,
            own_outputs=self._own_outputs,
            values=[name for name in order if name not in copies],
            copies=[name for name in order if name in copies],
            devices=[device for _, device in draws],
        )
        named: dict[str, dict[str, str]] = {}
        for (name, device), state in zip(draws, states, strict=True):
            named.setdefault(name, {})[device] = state
        mark_remade(
            forward,
            backward,
            Remade(forward=self._source.graph, blocks=tuple(self._blocks(remake)), carried=carried, states=named),
        )

    def _blocks(self, remake: Remake) -> Iterator[RemadeBlock]:
        for block in remake.blocks:
            compute = tuple(tuple(self._compute.nodes[number]) for number in block)
            dropped = tuple(node.name for nodes in compute for node in nodes if node.name in remake.dropped)
            yield RemadeBlock(compute=compute, dropped=dropped)


def plan_remade(
    forward: fx.GraphModule, backward: fx.GraphModule, word: str, *, bucket_bytes: int, own_outputs: int
) -> tuple[SavedMemory, ...]:
    """Let all blocks run again that can, where `word`, the option's, is that for it; return the memory that is saved then."""
    if word == RECOMPUTE:
        remakable = Remakable(forward, backward, bucket_bytes=bucket_bytes, own_outputs=own_outputs)
        remakable.plan(forward, backward, remakable.blocks)
    return find_memories(forward.graph, backward.graph, own_outputs=own_outputs)


def _saved(forward: fx.GraphModule, backward: fx.GraphModule, bucket_bytes: int, own_outputs: int) -> dict[str, int]:
    """Return the saved values that may be dropped, with the compute of the backward that reads them first."""
    scheduled = just_in_time(backward, bucket_bytes).graph
    stretches, place = Stretches(scheduled), positions(scheduled)
    found: dict[str, int] = {}
    by_name = {node.name: node for node in scheduled.nodes if node.op == "placeholder"}
    for memory in find_memories(forward.graph, backward.graph, own_outputs=own_outputs):
        for name in memory.inputs:
            if by_name[name].users:
                found[name] = stretches.of(min(by_name[name].users, key=place.__getitem__))
    return found


def _unit_behind(full: fx.Node) -> fx.Node:
    """Return the parameter whose gathered values a node has."""
    (gather,) = full.all_input_nodes
    return gather.all_input_nodes[0]


def _held_by_callers(forward: fx.Graph, backward: fx.Graph, names: Iterable[str], own_outputs: int) -> set[str]:
    """Return those values that the caller may write to unseen before the backward: inputs and results, and views of them."""
    output = forward.output_node()
    mutated = set(mutated_inputs(output).values())
    results = {memory_of(node) for node in returned(forward)[:own_outputs] if isinstance(node, fx.Node)}
    known = {node.name for node in backward.nodes if node.op == "placeholder"}
    by_name = {node.name: node for node in forward.nodes}
    found = set()
    for name in names:
        node = by_name[name]
        if slot_of(node) is not None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        memory = memory_of(node)
        if node.op == "placeholder":
            changes = aot_index(node) in mutated
            large = bytes_of_value(node.meta["val"]) > LEAST_BUFFER_BYTES
            checked = name in known or (buffer_of(node) is not None and large)
            if changes or not checked:
                found.add(name)
        elif memory is None or memory.op == "placeholder" or memory in results:
            found.add(name)
    return found


class ForwardRegions:
    """The compiled regions of a forward, which its backward runs again."""

    def __init__(self) -> None:
        self._functions: dict[Hashable, Function] = {}

    def of(self, kind: str, compile_region: RegionCompiler) -> RegionCompiler:
        """Return a compiler of a graph's regions; those of a backward that run again are the forward's, compiled already."""

        def compile_and_note(region: fx.GraphModule) -> Function:
            found = self._functions[structure(region)] = compile_region(region)
            return found

        def compile_or_find(region: fx.GraphModule) -> Function:
            if not any(runs_again(node) for node in region.graph.nodes if node.op == "call_function"):
                return compile_region(region)
            found = self._functions.get(structure(region))
            assert found is not None, "a region that runs again is one of its forward's"
            return found

        return {"forward": compile_and_note, "backward": compile_or_find}.get(kind, compile_region)
