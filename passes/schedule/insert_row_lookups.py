"""Gather single rows for an embedding, where they are fewer bytes than its parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.ir.program import ParameterSlot
from zinf_compile.ir.row_rounds import rounds_of_rows
from zinf_compile.passes.graph.alias import ALIASES, METADATA_OPS, is_cast
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import hinted_numel, parameters

aten = torch.ops.aten


def insert_row_lookups(gm: fx.GraphModule, *, chosen: Callable[[ParameterSlot], bool]) -> fx.GraphModule:
    """Replace embeddings by `gather_rows` for each `chosen` parameter that the graph reads in no other way.

        before:  y = embedding(w, i)
        after:   y = gather_rows(w, i)

    Runs on a joint graph before partitioning, or on an inference graph. The gradient doesn't read the parameter and stays as it
    is. `tile_matmuls` does the same for parameters in tiles.
    """
    for unit, slot in parameters(gm.graph):
        for lookup, chain in find_lookups(unit, slot) if chosen(slot) else ():
            emit = NodeBuilder(gm.graph, lookup)
            found = emit(ops.gather_rows, unit, lookup.args[1], name="rows")
            for cast in filter(is_cast, chain):
                found = emit(cast.target, found, *cast.args[1:], kwargs=cast.kwargs)
            lookup.replace_all_uses_with(found)
            gm.graph.erase_node(lookup)
            for step in reversed(chain):
                if not step.users:
                    gm.graph.erase_node(step)
    return gm


def find_lookups(unit: fx.Node, slot: ParameterSlot) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the embeddings that read a parameter, each with the casts and aliases before it; none if it has other readers."""
    if slot.tiles or not rounds_of_rows(slot.shape, slot.stride, slot.tiles, slot.format):
        return []
    found: list[tuple[fx.Node, list[fx.Node]]] = []
    stack: list[tuple[fx.Node, list[fx.Node]]] = [(unit, [])]
    while stack:
        source, chain = stack.pop()
        for user in source.users:
            if user.target in METADATA_OPS:
                continue
            if is_cast(user) or user.target in ALIASES:
                stack.append((user, [*chain, user]))
            elif user.target is aten.embedding.default and user.args[1] is not source and not any(user.args[3:]):
                found.append((user, chain))
            else:
                return []
    return found


def rows_named(lookups: Sequence[tuple[fx.Node, Sequence[fx.Node]]]) -> float:
    """Return the upper bound of rows that the lookups read, with dynamic sizes as traced."""
    indices = [lookup.args[1] for lookup, _ in lookups]
    return float(sum(hinted_numel(node.meta["val"]) for node in indices if isinstance(node, fx.Node)))
