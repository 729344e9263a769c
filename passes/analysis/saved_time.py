"""How long saved memory is away from the device, and which of it is alike in equal blocks: what a choice of it goes by."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.op_spec import SCHEDULE_OPS
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.graph.alias import aliased_inputs, memory_of
from zinf_compile.passes.graph.node_facts import module_of

from .blocks import block_of
from .region_facts import bytes_of_value, kind_of, operations_of, shape_of, type_of
from .saved_memories import returned


def seconds_away(
    forward: fx.Graph,
    backward: fx.Graph,
    memories: Sequence[SavedMemory],
    *,
    flops_per_second: Callable[[torch.dtype], float],
    bytes_per_second: float,
    others: float = 0.0,
) -> dict[str, float]:
    """Return by name the seconds of compute while each memory is away, in scheduled graphs that move all of them.

    `others`: how many times as long as these two graphs others run in between. Memory that no compute runs without is left out:
    it is back as soon as it has left.
    """

    def seconds(node: fx.Node) -> float:
        if node.op != "call_function" or node.target in SCHEDULE_OPS or aliased_inputs(node):
            return 0.0
        operations, moved = operations_of(node), bytes_of_value(node.meta.get("val"))
        return max(operations / flops_per_second(type_of(node)) if operations else 0.0, moved / bytes_per_second)

    before, after = _sums(forward, seconds), _sums(backward, seconds)
    waits, starts = returned(forward), _starts(backward)
    between = others * (before[forward.output_node()] + after[backward.output_node()])
    found = {}
    for memory in memories:
        left = waits[memory.outputs[0]]
        away = before[forward.output_node()] - before[left] + between + after[starts[memory.inputs[0]]]
        if away > 0:
            found[memory.name] = away
    return found


def kinds_of(forward: fx.Graph, memories: Sequence[SavedMemory]) -> Mapping[str, Hashable]:
    """Return by name what is equal for equal memory of equal blocks of the model: where and by what it is made, and its size."""
    values, times = returned(forward), Counter[Hashable]()
    found: dict[str, Hashable] = {}
    for memory in memories:
        value = values[memory.outputs[0]]
        made = memory_of(value) or value
        module = module_of(made)
        block = block_of(module)
        kind = (re.sub(r"\d+", "#", block), module[len(block) :], kind_of(made), *shape_of(made), memory.bytes)
        times[block, kind] += 1
        found[memory.name] = (*kind, times[block, kind])
    return found


def _sums(graph: fx.Graph, seconds: Callable[[fx.Node], float]) -> dict[fx.Node, float]:
    """Return for each node the seconds of what runs before it."""
    nodes = list(graph.nodes)
    return dict(zip(nodes, itertools.accumulate(map(seconds, nodes[:-1]), initial=0.0), strict=True))


def _starts(backward: fx.Graph) -> dict[str, fx.Node]:
    """Return by the name of a placeholder the last hop that brings it back, which takes memory of the device."""
    found: dict[str, fx.Node] = {}
    handles: dict[fx.Node, list[str]] = {}
    for node in backward.nodes:
        if node.target is ops.swap_values_in:
            values = node.args[0]
            names = handles[values] if isinstance(values, fx.Node) else [value.name for value in values]
            handles[node] = names
            if node.args[2] == Tier.DEVICE:
                found.update(dict.fromkeys(names, node))
    return found
