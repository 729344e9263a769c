"""Swap saved values in to the device in front of their first use in the backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.saved_memory import SavedMemory
from zinf_compile.ir.tiers import Tier
from zinf_compile.passes.analysis.step_regions import transfers_before
from zinf_compile.passes.analysis.stretches import Stretches
from zinf_compile.passes.graph.build_nodes import new_move
from zinf_compile.passes.graph.node_facts import fake_mode_of, fake_value, positions, returning


def fetch_saved_values(gm: fx.GraphModule, *, hops: Callable[[Tier], Sequence[str]]) -> fx.GraphModule:
    """Bring each saved memory that left back to the device, and read its values from there.

        before:  g = all_gather(w);  v = wait(g);  a = mm(x, v);  release(v)
                 h = all_gather(u);  f = wait(h);  b = mm(a, f);  c = mul(b, r);  d = sin(t);  release(f);  return (c, d)
        after:   s = swap_values_in([r, t], "host", "device");  g = all_gather(w);  v = wait(g);  a = mm(x, v);  release(v)
                 h = all_gather(u);  f = wait(h);  p = wait_value(s, 0);  q = wait_value(s, 1)
                 b = mm(a, f);  c = mul(b, p);  d = sin(q);  release(f);  return (c, d)

    The waits are in front of the first stretch of compute that reads the memory, the last hop as many stretches before as the
    memory's `lead` says, and each hop another one before the next. `hops` returns the tiers from one to the device. No stretch is
    cut, and no collective moves.
    """
    moving = returning(gm)
    if not moving:
        return gm
    graph = gm.graph
    place, stretches = positions(graph), Stretches(graph)
    output = graph.output_node()
    by_name = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    starts = [nodes[0] for nodes in stretches.nodes]
    transfers = [transfers_before(start, {ops.all_gather, ops.wait}) for start in starts]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    found: list[tuple[int, fx.Node, list[fx.Node], SavedMemory]] = []
    for memory in moving:
        values = [by_name[name] for name in memory.inputs]
        readers = [user for value in values for user in value.users]
        if readers:
            reader = min(readers, key=place.__getitem__)
            due = stretches.of(reader)
            found.append((due, _place(reader, due, stretches, first, output), values, memory))
    found.sort(key=lambda row: row[0])
    for due, before, values, memory in found:
        mode, fakes = fake_mode_of(values[0]), [fake_value(value) for value in values]
        path = list(itertools.pairwise(hops(memory.tier)))
        handle: object = values
        for ahead, (src, dst) in zip(range(len(path), 0, -1), path, strict=True):
            number = max(0, min(due, len(starts)) - ahead - memory.lead + 1)
            name = "copied" if Tier(src).in_memory else "read"
            with graph.inserting_before(transfers[number] if starts else first):
                handle = new_move(graph, mode, ops.swap_values_in, (handle, src, dst), name, fakes)
        assert isinstance(handle, fx.Node)
        for index, value in enumerate(values):
            with graph.inserting_before(before):
                back = new_move(graph, mode, ops.wait_value, (handle, index), f"{value.name}_back", fakes[index])
            value.replace_all_uses_with(back, delete_user_cb=lambda user: user.target is not ops.swap_values_in)
    return gm


def _place(reader: fx.Node, due: int, stretches: Stretches, first: fx.Node, output: fx.Node) -> fx.Node:
    """Return what the waits go in front of: the reader's stretch; or what follows the one before it."""
    if stretches.contains(reader):
        return stretches.nodes[due][0]
    if reader is output:
        return output
    return stretches.nodes[due - 1][-1].next if due else first
