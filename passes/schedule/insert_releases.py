"""Release each gathered unit right after its last use."""

from __future__ import annotations

import torch
from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.graph.alias import alias_closure
from zinf_compile.passes.graph.node_facts import positions


def insert_releases(gm: fx.GraphModule) -> fx.GraphModule:
    """Insert one release per gathered unit, after the last operator that touches its memory.

        before:  v = wait(g);  t = t(v);  a = mm(x, t);                 b = relu(a)
        after:   v = wait(g);  t = t(v);  a = mm(x, t);  release(v);    b = relu(a)

    Aliases of the unit's memory are found from the operators' schemas. An output that shares it is returned as a clone.
    """
    graph = gm.graph
    place = positions(graph)
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    clones: dict[fx.Node, fx.Node] = {}
    for full in [node for node in graph.nodes if node.target is ops.wait]:
        shared = alias_closure(full)
        for escaping in sorted((n for n in shared if output in n.users and n not in clones), key=place.__getitem__):
            with graph.inserting_before(output):
                clone = graph.create_node("call_function", torch.ops.aten.clone.default, (escaping,), name="clone")
            clone.meta["val"] = escaping.meta["val"]
            place[clone] = len(place)
            clones[escaping] = clone
        touching = {user for node in shared for user in node.users if user is not output} | shared
        last = max(touching, key=place.__getitem__)
        with graph.inserting_after(last):
            graph.call_function(ops.release, (full,))
    output.args = fx.map_arg(output.args, lambda node: clones.get(node, node))
    return gm
