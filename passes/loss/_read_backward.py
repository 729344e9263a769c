"""Pattern matching of a loss's backward: from the log-softmax to the gradients of hidden states, weight and bias."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from zinf_compile.passes.graph.alias import ALIASES, MOVES, is_cast
from zinf_compile.passes.graph.node_facts import fake_value

from ._gradient_terms import Term, terms_of
from ._read_logits import Logits, untransposed
from ._row_ops import ROW_OPS, Steps, UnknownLogitsError, axis_after, input_of, is_class_sum, is_pointwise

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backward:
    """Operators from the gradient of the log-probabilities to those of the head."""

    root: fx.Node
    """_log_softmax_backward_data."""
    terms: tuple[Term, ...]
    steps: Steps
    """Row operators after `root`."""
    hidden: fx.Node | None = None
    """The product that computes the gradient of the head's input; None if that isn't wanted."""
    weight: fx.Node | None = None
    transposed: bool = False
    """True if `weight` computes the transposed gradient, with one column per class."""
    bias: fx.Node | None = None


def read_backward(logits: Logits, root: fx.Node) -> Backward:
    """Follow the gradient of the logits to the products that read it; raise `UnknownLogitsError` if they aren't the head's."""
    axis, node, steps = logits.axis, root, []
    pointwise = []
    while not _is_at_product(logits, node):
        users = list(node.users)
        if len(users) != 1 or not (users[0].target in ROW_OPS or is_pointwise(users[0])):
            raise UnknownLogitsError("the gradient of its logits is used", users[0] if users else node)
        node = users[0]
        if node.target in ROW_OPS:
            axis = axis_after(node, axis)
            steps.append((node, axis))
        else:
            pointwise.append(node)
    _require_inverse(logits, pointwise)
    gradient = input_of(root)
    return Backward(root=root, terms=terms_of(gradient, logits.axis), steps=steps, **_uses(logits, node))


def _is_at_product(logits: Logits, node: fx.Node) -> bool:
    if fake_value(node).shape != fake_value(logits.product).shape:
        return False
    return any(
        user.target in (aten.mm.default, aten.sum.dim_IntList)
        or (user.target in MOVES and any(n.target is aten.mm.default for n in user.users))
        for user in node.users
    )


def _uses(logits: Logits, grad: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for user in grad.users:
        flipped = user.target in MOVES
        for node in list(user.users) if flipped else [user]:
            use = _use(logits, grad, user if flipped else None, node)
            if use.keys() & found.keys():
                raise UnknownLogitsError("the gradient of its logits is used more than once", node)
            found |= use
    return found


def _use(logits: Logits, grad: fx.Node, transposed: fx.Node | None, node: fx.Node) -> dict[str, Any]:
    """Return the fields of `Backward` that `node` computes from the product's gradient, or from its transpose."""
    if node.target is aten.sum.dim_IntList and transposed is None and list(node.args[1]) == [0]:  # type: ignore[arg-type]
        if logits.bias is not None:
            return {"bias": node}
    elif node.target is aten.mm.default:
        left, right = node.all_input_nodes if len(node.all_input_nodes) == 2 else (grad, grad)
        other, flipped = untransposed(left if right in (grad, transposed) else right)
        if transposed is None and left is grad and other is logits.weight and not flipped:
            return {"hidden": node}
        if transposed is not None and left is transposed and other is logits.hidden and not flipped:
            return {"weight": node}
        if transposed is None and right is grad and other is logits.hidden and flipped:
            return {"weight": node, "transposed": True}
    raise UnknownLogitsError("the gradient of its logits is used", node)


def _require_inverse(logits: Logits, backward: list[fx.Node]) -> None:
    """Raise unless the backward inverts the element-wise operators of the forward, in order."""
    forward = [step for step in logits.pointwise[::-1] if not is_class_sum(step)]
    if len(forward) != len(backward):
        raise UnknownLogitsError("its gradient isn't that of its logits", logits.softmax)
    for step, back in zip(forward, backward, strict=True):
        if is_cast(step):
            same = is_cast(back) and fake_value(back).dtype == fake_value(input_of(step)).dtype
        elif step.target is aten.tanh.default:
            same = back.target is aten.tanh_backward.default and _origin(back.args[1]) is step
        else:
            same = back.target is step.target and back.args[1] == step.args[1]
        if not same:
            raise UnknownLogitsError("its gradient isn't that of its logits", back)


def _origin(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in ALIASES:
        node = node.args[0]
    return node
