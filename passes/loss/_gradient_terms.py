"""Terms of a log-probability gradient as autograd writes it: each reaches all classes, or the target alone."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from zinf_compile.passes.graph.alias import VIEWS
from zinf_compile.passes.graph.node_facts import fake_value

from ._row_ops import PRODUCTS, SCALAR_OPS, UnknownLogitsError, axis_after

aten = torch.ops.aten

NLL_BACKWARD = frozenset({aten.nll_loss_backward.default, aten.nll_loss2d_backward.default})
_ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default, aten.full.default})


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """One summand of the gradient of log-probabilities: `grad` per token, at its target or at all classes."""

    grad: fx.Node
    nll: fx.Node | None = None
    """The nll_loss_backward of the term. Its reduction and weights are still to be applied to `grad`."""
    targets: fx.Node | None = None
    """None for a gradient of all classes."""
    weights: fx.Node | None = None
    scale: float = 1.0


def terms_of(gradient: fx.Node, axis: int) -> tuple[Term, ...]:
    """Split the gradient of log-probabilities with classes on `axis` into terms; raise `UnknownLogitsError` for other forms."""
    if len(gradient.users) != 1:
        raise UnknownLogitsError("the gradient of its log-probabilities is used", gradient)
    shape = fake_value(gradient).shape
    source = gradient.args[0] if gradient.args else None
    if gradient.target is aten.add.Tensor and not gradient.kwargs and len(gradient.all_input_nodes) == 2:
        return tuple(term for part in gradient.all_input_nodes for term in terms_of(part, axis))
    if gradient.target is aten.neg.default and isinstance(source, fx.Node):
        return _scaled(terms_of(source, axis), -1.0)
    if gradient.target in SCALAR_OPS and is_number(gradient.args[1]) and isinstance(source, fx.Node):
        factor = float(gradient.args[1])  # type: ignore[arg-type]
        return _scaled(terms_of(source, axis), factor if gradient.target in PRODUCTS else 1 / factor)
    if gradient.target in VIEWS and isinstance(source, fx.Node):
        before = fake_value(source).shape
        axes = [a for a, size in enumerate(before) if size == shape[axis] and axis_after(gradient, a) == axis]
        if axes:
            return terms_of(source, axes[0])
    if gradient.target in NLL_BACKWARD and isinstance(source, fx.Node) and axis == 1:
        return (Term(source, nll=gradient, targets=gradient.args[2], weights=gradient.args[3]),)  # type: ignore[arg-type]
    if gradient.target is aten.scatter_add.default and isinstance(source, fx.Node):
        index, values = gradient.args[2:4]
        assert isinstance(index, fx.Node)
        assert isinstance(values, fx.Node)
        zeros = source.target in _ZEROS and (source.target is not aten.full.default or source.args[1] == 0)
        if zeros and int(gradient.args[1]) % len(shape) == axis and fake_value(index).shape == _one_wide(shape, axis):  # type: ignore[arg-type]
            return (Term(values, targets=index),)
    if gradient.target is aten.expand.default and isinstance(source, fx.Node) and _is_one_wide(source, shape, axis):
        return (Term(source),)
    if gradient.target is aten.mul.Tensor:
        for part in gradient.all_input_nodes:
            weights = class_weights(gradient, part, axis)
            whole = part.args[0] if part.target is aten.expand.default else part
            if weights is not None and isinstance(whole, fx.Node) and _is_one_wide(whole, shape, axis):
                return (Term(whole, weights=weights),)
    raise UnknownLogitsError("the gradient of its log-probabilities is of no known form", gradient)


def class_weights(product: fx.Node, source: fx.Node, axis: int) -> fx.Node | None:
    """Return the factor of `product` beside `source` if it has one number per class, else None."""
    other = next((n for n in product.all_input_nodes if n is not source), None)
    if other is None:
        return None
    shape, rank = list(fake_value(other).shape), fake_value(product).dim()
    classes = fake_value(product).shape[axis]
    alone = fake_value(other).numel() == classes and 0 <= rank - len(shape) <= axis
    return other if alone and shape[axis - rank] == classes else None


def is_number(value: object) -> bool:
    """Return whether an argument is a constant number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scaled(terms: tuple[Term, ...], factor: float) -> tuple[Term, ...]:
    return tuple(dataclasses.replace(term, scale=term.scale * factor) for term in terms)


def _one_wide(shape: torch.Size, axis: int) -> torch.Size:
    return torch.Size([*shape[:axis], 1, *shape[axis + 1 :]])


def _is_one_wide(node: fx.Node, shape: torch.Size, axis: int) -> bool:
    """Return whether a value has one number per token."""
    return fake_value(node).shape == _one_wide(shape, axis)
