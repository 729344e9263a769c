"""Compute MLPs a slice of tokens at a time, so that their wide values never exist as a whole."""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence

import torch
from torch import fx

from zinf_compile.passes.graph.node_facts import is_backward, note_skipped, user_line

from ._bodies import LoopMaker, LoopPlan
from ._stretches import LeftWholeError, Stretch, Stretches

ROWS = 64
"""Slices are multiples of this many tokens, unless fewer fit."""

aten = torch.ops.aten

_log = logging.getLogger("zinf_compile")


def tile_tokens(gm: fx.GraphModule, *, tile_bytes: int | None = None, small: bool = True) -> fx.GraphModule:
    """Replace an MLP by a loop over slices of tokens, and its backward by another, which computes the slice's forward again.

        before:  t = t(up);  a = mm(x, t);  h = relu(a);  u = t(down);  y = mm(h, u);  return (y,)
        after:   t = t(up);  u = t(down);  loop = token_loop(x, t, u);  y = loop[0];  return (y,)

    The loop holds one slice's values that are wider than its input, each of at most `tile_bytes`. On a joint graph nothing of
    them is saved: the backward reads the input, which a norm in front of the MLP is computed again from. Gradients of weights
    are summed over slices, of 16 bits in fp32. The units that a loop reads are gathered once.

    What is cut follows from operators and widths of rows alone (`_stretches`), so that ranks with other batches gather alike.
    With `small=False`, stretches of one slice stay as they are. Attention, convolutions, routed experts and what draws random
    numbers are never inside; neither are parameters in tiles.
    """
    if tile_bytes is None:
        return gm
    _read_sizes_early(gm.graph)
    found = Stretches(gm.graph)
    maker = LoopMaker()
    for stretch in found.find():
        tile = choose_tile(stretch.row_bytes, tile_bytes)
        tokens = stretch.ops.tokens
        if not small and isinstance(tokens, int) and tokens <= tile:
            continue
        try:
            _rewrite(gm.graph, stretch, maker, tile)
        except LeftWholeError as error:
            found.skipped.append((stretch.forward[0], str(error)))
    gm.graph.eliminate_dead_code()  # transposes that the loops repeat
    for node, reason in found.skipped:
        _note(gm, node, reason)
    return gm


def choose_tile(row_bytes: int, tile_bytes: int) -> int:
    """Return the tokens of a slice whose widest value has `row_bytes` for each."""
    rows = max(1, tile_bytes // row_bytes)
    return rows // ROWS * ROWS or rows


def _read_sizes_early(graph: fx.Graph) -> None:
    """Read sizes known at run time only off the first value that has them, so that none is read off a value inside a stretch."""
    known: dict[object, tuple[fx.Node, int | None]] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            source, dim = known.setdefault(value.node.expr, (node, None))
            if node.target is aten.sym_size.int and source is not node:
                if dim is None:
                    node.replace_all_uses_with(source)
                else:
                    node.args = (source, dim)
        elif isinstance(value, torch.Tensor) and not (node.op == "placeholder" and is_backward(node)):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    known.setdefault(size.node.expr, (node, dim))


def _rewrite(graph: fx.Graph, stretch: Stretch, maker: LoopMaker, tile: int) -> None:
    """Plan both loops, then write them."""
    plans = [(stretch.forward, maker.make(stretch.ops, stretch.forward, _given(stretch.forward, stretch.forward), tile))]
    if stretch.backward:
        nodes = (*stretch.again, *stretch.backward)
        plans.append((stretch.backward, maker.make(stretch.ops, nodes, _given(stretch.backward, stretch.backward), tile)))
    places = [(nodes, plan, _dependent(nodes, plan)) for nodes, plan in plans]
    replaced: dict[fx.Node, fx.Node] = {}
    for nodes, plan, dependent in places:
        inputs = [replaced.get(node, node) for node in (*plan.rows, *plan.whole)]  # the backward may read results
        replaced.update(_write(graph, nodes, plan, inputs, dependent))
    for nodes, _ in reversed(plans):
        for node in reversed(nodes):
            for user in list(node.users):  # transposes that nothing reads any more
                graph.erase_node(user)
            graph.erase_node(node)


def _given(nodes: Sequence[fx.Node], inside: Sequence[fx.Node]) -> list[fx.Node]:
    """Return those of the nodes that others read, but for what their own backward computes again."""
    own = set(inside)

    def is_read(node: fx.Node) -> bool:
        others = (user for user in node.users if user not in own and not _is_inlined(user, own))
        return any(is_backward(node) or not is_backward(user) for user in others)

    return [node for node in nodes if isinstance(node.meta["val"], torch.Tensor) and is_read(node)]


def _is_inlined(user: fx.Node, own: set[fx.Node]) -> bool:
    return bool(user.users) and all(reader in own for reader in user.users) and user.op == "call_function"


def _dependent(nodes: Sequence[fx.Node], plan: LoopPlan) -> list[fx.Node]:
    """Return the other nodes between a stretch's first and last that read its results; they move behind the loop."""
    inside, behind = set(nodes), []
    known = set(plan.outs)
    node = nodes[0]
    while node is not nodes[-1]:
        node = node.next
        if node not in inside and any(source in known for source in node.all_input_nodes):
            behind.append(node)
            known.add(node)
    if strange := [source for source in (*plan.rows, *plan.whole) if source in behind]:
        raise LeftWholeError(f"{strange[0].name} is computed from its results and read by it")
    return behind


def _write(
    graph: fx.Graph, nodes: Sequence[fx.Node], plan: LoopPlan, inputs: Sequence[fx.Node], dependent: Sequence[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Insert the loop behind the last of its operators; return what its results replace."""
    inside, last = set(nodes), nodes[-1]
    with graph.inserting_after(last):
        loop = graph.create_node("call_function", plan.loop, tuple(inputs), name="loop")
    loop.meta.update({key: value for key, value in last.meta.items() if key not in ("val", "tensor_meta", "desc")})
    loop.meta["val"] = [out.meta["val"] for out in plan.outs]
    place, replaced = loop, {}
    for number, out in enumerate(plan.outs):
        with graph.inserting_after(place):
            place = graph.create_node("call_function", operator.getitem, (loop, number), name=f"{loop.name}_{number}")
        place.meta.update(out.meta)
        replaced[out] = place
        out.replace_all_uses_with(place, delete_user_cb=lambda user: user not in inside)
    for node in dependent:
        place.append(node)
        place = node
    return replaced


def _note(gm: fx.GraphModule, node: fx.Node, reason: str) -> None:
    what = f"tile_tokens leaves the stretch of {node.name} whole: {reason}"
    note_skipped(gm, what)
    line = user_line(node)
    _log.info("%s%s", what, f"\n{line}" if line else "")
