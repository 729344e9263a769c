"""Gradients of a loss for a tangent of 1, which the forward can compute before the backward's tangent is known.

The backward multiplies them by the tangent. That is exact only if they are linear in it, which `find_tangent` checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from zinf_compile.passes.graph.alias import is_cast
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, positions

from ._row_ops import UnknownLogitsError

aten = torch.ops.aten

_SHAPES = frozenset(
    {
        aten.expand.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.squeeze.dims,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten.neg.default,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.select.int,
        aten.slice.Tensor,
        aten.select_backward.default,
        aten.slice_backward.default,
        aten.permute.default,
        aten.transpose.int,
        aten.mul.Scalar,
        aten.div.Scalar,
    }
)
"""Operators of one tensor, their first argument, that are linear in it."""


def find_tangent(graph: fx.Graph, grads: Sequence[fx.Node], unknown: set[fx.Node]) -> fx.Node:
    """Return the last scalar in the graph that carries the gradients' whole dependence on tangents, linearly.

    Raises `UnknownLogitsError` if there is none, or if the gradients also depend on values in `unknown`, computed from the loss.
    """
    depending = _depending(graph)
    place = positions(graph)
    scalars = [node for node in depending if _is_scalar(node)]
    error = UnknownLogitsError("its gradient is not one number for all tokens (a loss for each token is returned)", grads[0])
    for scalar in sorted(scalars, key=place.__getitem__, reverse=True):
        try:
            _cone(grads, scalar, depending, unknown)
        except UnknownLogitsError as found:
            error = error if found.reason == _MORE else found
        else:
            return scalar
    raise error


def at_unit_tangent(insert: NodeBuilder, grads: Sequence[fx.Node], tangent: fx.Node) -> list[fx.Node]:
    """Write the gradients with 1 in place of the scalar `tangent`, on which they depend linearly."""
    graph = tangent.graph
    cone = _cone(grads, tangent, _depending(graph), set())
    value = fake_value(tangent)
    one = insert(aten.full.default, list(value.shape), 1, dtype=value.dtype, device=value.device, name="one")
    copies = {tangent: one}
    place = positions(graph)
    for node in sorted(cone - {tangent}, key=place.__getitem__):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        copies[node] = insert(node.target, *args, **kwargs)  # type: ignore[arg-type]
    return [copies[grad] for grad in grads]


def inputs_of(grads: Sequence[fx.Node], tangent: fx.Node) -> set[fx.Node]:
    """Return the values that the gradients depend on besides the tangent."""
    cone = _cone(grads, tangent, _depending(tangent.graph), set())
    return {source for node in cone - {tangent} for source in node.all_input_nodes if source not in cone}


_MORE = "its gradient depends on more than one tangent"


def _depending(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on tangents."""
    depending: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or (node.op == "call_function" and any(n in depending for n in node.all_input_nodes)):
            depending.add(node)
    return depending


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def _cone(grads: Sequence[fx.Node], tangent: fx.Node, depending: set[fx.Node], unknown: set[fx.Node]) -> set[fx.Node]:
    cone: set[fx.Node] = {tangent}
    stack = [grad for grad in grads if grad is not tangent]
    while stack:
        node = stack.pop()
        if node in cone:
            continue
        if node not in depending or node.op != "call_function":
            raise UnknownLogitsError(_MORE, node)
        _require_linear(node, depending)
        cone.add(node)
        for source in node.all_input_nodes:
            if source in unknown:
                raise UnknownLogitsError("its gradient depends on its own value", node)
            if source in depending:
                stack.append(source)
    return cone


def _require_linear(node: fx.Node, depending: set[fx.Node]) -> None:
    sources = [n in depending for n in node.all_input_nodes]
    first = node.args[0] in depending if node.args else False
    if node.target in _SHAPES or is_cast(node):
        linear = first and sum(sources) == 1
    elif node.target is aten.mul.Tensor:
        linear = sum(sources) == 1 and node.args[0] is not node.args[1]
    elif node.target is aten.div.Tensor:
        linear = first and sum(sources) == 1
    elif node.target in (aten.add.Tensor, aten.sub.Tensor):
        linear = all(sources) and len(node.args) == 2 and all(isinstance(a, fx.Node) for a in node.args)
    elif node.target is aten.masked_fill.Scalar:
        linear = first and sum(sources) == 1 and _is_zero(node.args[2])
    elif node.target is aten.where.self:
        linear = node.args[0] not in depending and all(n in depending or _is_zero(n) for n in node.args[1:])
    else:
        linear = False
    if not linear:
        raise UnknownLogitsError("its gradient isn't known to be linear in its tangent", node)


def _is_zero(value: object) -> bool:
    if isinstance(value, fx.Node):
        fixed = {aten.scalar_tensor.default: 0, aten.full.default: 1}.get(value.target)  # type: ignore[call-overload]
        return fixed is not None and _is_zero(value.args[fixed])
    return isinstance(value, (int, float)) and value == 0
