"""Swap saved values out behind their last use in the forward."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.analysis.stretches import Stretches
from zinf_compile.passes.graph.alias import sharing
from zinf_compile.passes.graph.build_nodes import new_move
from zinf_compile.passes.graph.node_facts import fake_mode_of, fake_value, leaving, positions


def offload_saved_values(gm: fx.GraphModule, *, hops: Callable[[Tier], Sequence[str]]) -> fx.GraphModule:
    """Move each saved memory that leaves away from the device, once for all values that are views of it, and return stand-ins.

        before:  g = all_gather(w);  v = wait(g);  a = mm(x, v);  r = relu(a);  t = t(r);  release(v)
                 h = all_gather(u);  f = wait(h);  b = mm(r, f);  release(f)
                 k = all_gather(z);  q = wait(k);  c = mm(b, q);  release(q);  return (c, r, t)
        after:   g = all_gather(w);  v = wait(g);  a = mm(x, v);  r = relu(a);  t = t(r);  release(v)
                 h = all_gather(u);  f = wait(h);  b = mm(r, f);  o = swap_values_out([r, t], "device", "host");  release(f)
                 k = all_gather(z);  q = wait(k);  c = mm(b, q);  s = wait_value(o, 0);  p = wait_value(o, 1);  release(q)
                 return (c, s, p)

    The first hop starts behind the stretch of compute that reads the memory last, or writes to it; the next one, or the waits,
    follow as many stretches later as the memory's `lag` says, each further hop another one. `hops` returns the tiers from one to
    the device. No stretch is cut, so every choice computes the same bits, and no collective moves.
    """
    moving = leaving(gm)
    if not moving:
        return gm
    graph = gm.graph
    outputs, place, stretches = list(returned(graph)), positions(graph), Stretches(graph)
    output, mode = graph.output_node(), fake_mode_of(outputs[moving[0].outputs[0]])
    tails = [nodes[-1] for nodes in stretches.nodes]  # what the next operator behind each of them follows
    ends = {
        memory.name: max(map(stretches.of, _readers([outputs[number] for number in memory.outputs], place))) for memory in moving
    }

    def emit(behind: int, target: object, *args: object, name: str, like: Any) -> fx.Node:
        ended = behind >= len(tails)
        with graph.inserting_before(output) if ended else graph.inserting_after(tails[behind]):
            node = new_move(graph, mode, target, args, name, like)
        if not ended:
            tails[behind] = node
        return node

    later: list[tuple[int, int, fx.Node, list[tuple[str, str]]]] = []
    for number, memory in enumerate(moving):
        values = [outputs[position] for position in memory.outputs]
        path = list(itertools.pairwise(hops(memory.tier)[::-1]))
        src, dst = path[0]
        fakes = [fake_value(value) for value in values]
        handle = emit(ends[memory.name], ops.swap_values_out, values, src, dst, name="offloaded", like=fakes)
        heapq.heappush(later, (ends[memory.name] + memory.lag, number, handle, path[1:]))
    while later:  # what is behind an earlier stretch first
        behind, number, handle, path = heapq.heappop(later)
        if path:
            src, dst = path[0]
            handle = emit(behind, ops.swap_values_out, handle, src, dst, name="offloaded", like=handle.meta["val"])
            heapq.heappush(later, (behind + 1, number, handle, path[1:]))
            continue
        for index, position in enumerate(moving[number].outputs):
            value = outputs[position]
            outputs[position] = emit(behind, ops.wait_value, handle, index, name=f"{value.name}_saved", like=fake_value(value))
    output.args = (tuple(outputs),)
    return gm


def _readers(values: Sequence[fx.Node], place: dict[fx.Node, int]) -> set[fx.Node]:
    """Return the operators that make, read or write the memory of the values."""
    found: set[fx.Node] = set()
    for value in values:
        shared = sharing(value)
        found |= shared
        found.update(user for node in shared for user in node.users if user.op != "output")
    return {node for node in found if node in place}
