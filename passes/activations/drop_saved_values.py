"""Let saved values go at the end of the forward, which the backward makes again."""

from __future__ import annotations

from torch import fx

from zinf_compile.ir import ops
from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.analysis.step_regions import transfers_before
from zinf_compile.passes.analysis.stretches import Stretches
from zinf_compile.passes.graph.alias import sharing
from zinf_compile.passes.graph.build_nodes import new_move
from zinf_compile.passes.graph.node_facts import fake_mode_of, fake_value, positions
from zinf_compile.passes.graph.remade import dropping


def drop_saved_values(gm: fx.GraphModule) -> fx.GraphModule:
    """Return stand-ins for the values that are made again, and record random states in front of the compute that draws.

        before:  s = random_state("cpu")
                 g = all_gather(w);  v = wait(g);  a = mm(x, v);  r = relu(a);  release(v)
                 h = all_gather(u);  f = wait(h);  b = mm(r, f);  d = rand_like(b);  release(f)
                 k = all_gather(z);  q = wait(k);  c = mm(d, q);  release(q);  return (c, s, x, r)
        after:   g = all_gather(w);  v = wait(g);  a = mm(x, v);  r = relu(a);  release(v);  s = random_state("cpu")
                 h = all_gather(u);  f = wait(h);  b = mm(r, f);  d = rand_like(b);  t = drop_value(r);  release(f)
                 k = all_gather(z);  q = wait(k);  c = mm(d, q);  release(q);  return (c, s, x, t)

    A value goes behind the compute that reads its memory last. No compute is cut, and none gives other results than before.
    """
    remade = dropping(gm)
    if remade is None:
        return gm
    graph = gm.graph
    stretches, place = Stretches(graph), positions(graph)
    by_name = {node.name: node for node in graph.nodes}
    for name, states in remade.states.items():
        start = transfers_before(stretches.nodes[stretches.of(by_name[name])][0], {ops.all_gather, ops.wait})
        for state in states.values():
            start.prepend(by_name[state])
    outputs, output = list(returned(graph)), graph.output_node()
    tails = [nodes[-1] for nodes in stretches.nodes]
    for number, node in enumerate(outputs):
        if not isinstance(node, fx.Node) or node.name not in remade.dropped:
            continue
        shared = sharing(node)
        readers = shared | {user for each in shared for user in each.users if user is not output}
        behind = max(stretches.of(reader) for reader in readers if reader in place and reader.op == "call_function")
        behind = min(behind, len(tails) - 1)
        with graph.inserting_after(tails[behind]):
            dropped = new_move(graph, fake_mode_of(node), ops.drop_value, (node,), f"{node.name}_dropped", fake_value(node))
            tails[behind] = outputs[number] = dropped
    output.args = (tuple(outputs),)
    return gm
