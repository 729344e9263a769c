"""Move views and casts of parameters to their uses."""

from __future__ import annotations

from functools import partial

from torch import fx

from zinf_compile.passes.graph.alias import derived_from
from zinf_compile.passes.graph.node_facts import parameters, positions


def sink_unit_views(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the views and casts of a parameter in front of each of its consumers.

        before:  t = t(w);  a = relu(x);  b = mm(a, t);  c = mm(b, t)
        after:   a = relu(x);  t_1 = t(w);  b = mm(a, t_1);  t_2 = t(w);  c = mm(b, t_2)

    The partitioner puts recomputed views at the top of the backward, where they would gather all weights at once. Views are free
    and casts cheap. With its own copies, no consumer needs a unit to stay gathered since an earlier use.
    """
    graph = gm.graph
    derived = derived_from(node for node, _ in parameters(graph))
    place = positions(graph)
    for user in list(graph.nodes):
        if user in derived:
            continue
        chain = sorted(_derived_inputs(user, derived), key=place.__getitem__)
        copies: dict[fx.Node, fx.Node] = {}
        for node in chain:
            with graph.inserting_before(user):
                copies[node] = graph.node_copy(node, partial(_copied, copies))
        user.args = fx.map_arg(user.args, partial(_copied, copies))
        user.kwargs = fx.map_arg(user.kwargs, partial(_copied, copies))
    for node in reversed(list(graph.nodes)):
        if node in derived and not node.users:
            graph.erase_node(node)
    return gm


def _copied(copies: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    return copies.get(node, node)


def _derived_inputs(user: fx.Node, derived: set[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [user]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node in derived and node not in found:
                found.add(node)
                stack.append(node)
    return found
