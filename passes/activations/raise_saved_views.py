"""Move views that are saved for the backward up to what they are views of."""

from __future__ import annotations

from torch import fx

from zinf_compile.passes.analysis.saved_memories import returned
from zinf_compile.passes.graph.alias import aliased_inputs


def raise_saved_views(gm: fx.GraphModule, *, own_outputs: int) -> fx.GraphModule:
    """Take each view that only the backward reads right behind its source, in a forward as the cut leaves it.

        before:  a = relu(x);  b = mm(a, y);  d = detach(a);  return (b, a, d)
        after:   a = relu(x);  d = detach(a);  b = mm(a, y);  return (b, a, d)

    Autograd takes views of what it saves when all is computed: there they count as a last use of the memory, which would leave
    only then, and as a part of the last block, which is never computed again. The first `own_outputs` are the user's.
    """
    graph = gm.graph
    saved = {node for node in returned(graph)[own_outputs:] if isinstance(node, fx.Node)}
    for node in reversed(graph.nodes):  # what a view is a view of comes before it
        if node in saved:
            saved.update(source for source in aliased_inputs(node) if all(user in saved for user in source.users))
    for node in list(graph.nodes):
        if node in saved and node.op == "call_function" and all(user in saved or user.op == "output" for user in node.users):
            sources = aliased_inputs(node)
            if len(sources) == 1 == len(node.all_input_nodes) and sources[0].op == "call_function":
                sources[0].append(node)
    return gm
