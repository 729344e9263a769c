"""Give a backward values of its forward that it doesn't have, for compute that is to run again there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from zinf_compile._torch import describe_saved
from zinf_compile.ir import ops
from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.graph.build_nodes import new_node
from zinf_compile.passes.graph.node_facts import fake_mode_of


def carry_values(
    gm: fx.GraphModule,
    *,
    backward: fx.GraphModule,
    own_outputs: int,
    values: Iterable[str] = (),
    copies: Iterable[str] = (),
    devices: Iterable[str] = (),
) -> tuple[dict[str, str], list[str]]:
    """Let a forward return more values to its backward, and that take them; runs right after the cut.

        before:  forward:   a = mm(x, w);  b = relu(a);  return (b, a)
                 backward:  c = mul(a, g);  return (c,)
        after:   forward:   s = random_state("cpu");  a = mm(x, w);  b = relu(a);  k = copy_value(x);  return (b, s, w, k, a)
                 backward:  c = mul(a, g);  return (c,)

    with the backward's new inputs `s`, `w` and `k`. `values` are returned as they are, unless the backward has them, `copies` as
    they are in the forward, whatever becomes of their memory, and for each of `devices` the state of its random generator, which
    is recorded where a later pass puts it. `own_outputs` of the forward are the user's. Returns the names of the backward's
    placeholders: by those of the values, and of the states.
    """
    graph, output = gm.graph, gm.graph.output_node()
    by_name = {node.name: node for node in graph.nodes}
    known = {node.name for node in backward.graph.nodes if node.op == "placeholder"}
    first = next(node for node in graph.nodes if node.op != "placeholder")
    results = list(returned(graph))
    mode = fake_mode_of(next(node for node in results if isinstance(node, fx.Node) and not _is_number(node)))
    carried: dict[str, str] = {}
    tensors: list[fx.Node] = []
    numbers: list[fx.Node] = []
    for device in devices:
        with graph.inserting_before(first):
            tensors.append(new_node(graph, mode, ops.random_state, (device,), {}, "random"))
    states = [node.name for node in tensors]
    for name in values:
        carried[name] = name
        if name not in known:
            (numbers if _is_number(by_name[name]) else tensors).append(by_name[name])
    for name in copies:
        with graph.inserting_before(output):
            copied = new_node(graph, mode, ops.copy_value, (by_name[name],), {}, f"{name}_copy")
        carried[name] = copied.name
        tensors.append(copied)
    saved = results[own_outputs:]
    output.args = ((*results[:own_outputs], *tensors, *saved, *numbers),)
    describe_saved(output, own_outputs)
    _take(backward, tensors, numbers, sum(map(_is_number, saved)))
    return carried, states


def _take(backward: fx.GraphModule, tensors: Sequence[fx.Node], numbers: Sequence[fx.Node], known_numbers: int) -> None:
    """Add placeholders where AOTAutograd passes what it has saved: numbers first, then tensors."""
    graph = backward.graph
    present = {node.name: node for node in graph.nodes}
    place = list(graph.nodes)[known_numbers]
    with graph.inserting_before(place):
        for source in (*numbers, *tensors):
            taken = graph.placeholder(source.name)
            other = present.pop(source.name, None)
            if other is not None:  # computed again here, by the partitioner
                other.name = taken.name
                present[other.name] = other
            taken.name = taken.target = source.name  # FX gives another one where the partitioner had a node of that name
            taken.meta = {key: value for key, value in source.meta.items() if key != "desc" or source.op == "placeholder"}


def _is_number(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
