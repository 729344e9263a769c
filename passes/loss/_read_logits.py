"""Pattern matching of logits: a linear head, and the operators between its product and the log-softmax."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from zinf_compile.passes.graph.alias import MOVES
from zinf_compile.passes.graph.node_facts import fake_value

from ._gradient_terms import class_weights
from ._row_ops import ROW_OPS, Steps, UnknownLogitsError, axis_after, input_of, is_class_sum, is_pointwise

aten = torch.ops.aten

HEADS = frozenset({aten.mm.default, aten.addmm.default})

TYPES = frozenset({torch.float32, torch.bfloat16, torch.float64})
"""Data types of logits. fp16 is missing: the gradients for a tangent of 1 underflow before the loss scale multiplies them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Operators from hidden states to a log-softmax."""

    product: fx.Node
    hidden: fx.Node
    """The head's input, one row per token."""
    weight: fx.Node
    """One row per class."""
    bias: fx.Node | None
    rows: Steps
    """Row operators between the product and the log-softmax."""
    pointwise: tuple[fx.Node, ...]
    """Element-wise operators in between: casts, soft-capping, sums with one number per class."""
    softmax: fx.Node
    axis: int
    """Dimension of the classes in the log-softmax."""

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(fake_value(self.product).shape[1])

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(fake_value(self.softmax).numel()) // max(1, self.classes)


def read_logits(softmax: fx.Node) -> Logits:
    """Trace a log-softmax back to its linear head; raise `UnknownLogitsError` if it has none, or one of another form."""
    chain = _chain(softmax)
    product = input_of(chain[-1] if chain else softmax)
    if product.target not in HEADS:
        raise UnknownLogitsError("its logits don't come from a linear layer", product)
    sizes = (*fake_value(product).shape, *fake_value(softmax).shape)
    if not all(isinstance(size, int) for size in sizes):
        raise UnknownLogitsError("its number of tokens is dynamic", product)
    if 0 in sizes:
        raise UnknownLogitsError("it has no tokens", product)
    hidden, transposed = product.args[-2:]
    assert isinstance(hidden, fx.Node)
    assert isinstance(transposed, fx.Node)
    weight, flipped = untransposed(transposed)
    bias = product.args[0] if product.target is aten.addmm.default else None
    if not flipped or product.kwargs or (isinstance(bias, fx.Node) and fake_value(bias).dim() != 1):
        raise UnknownLogitsError("its head isn't of the form x @ weight.t() + bias", product)
    axis, rows = 1, []
    for step in reversed(chain):
        if step.target in ROW_OPS:
            axis = axis_after(step, axis)
            rows.append((step, axis))
        elif is_class_sum(step) and class_weights(step, input_of(step), axis) is None:
            raise UnknownLogitsError("its logits don't come from a linear layer", step)
    if int(softmax.args[1]) % fake_value(softmax).dim() != axis:  # type: ignore[arg-type]
        raise UnknownLogitsError("its softmax is not over the head's classes", softmax)
    for node in (product, softmax):
        if fake_value(node).dtype not in TYPES:
            raise UnknownLogitsError(f"it is of {fake_value(node).dtype}", node)
    return Logits(
        product=product,
        hidden=hidden,
        weight=weight,
        bias=bias if isinstance(bias, fx.Node) else None,
        rows=rows,
        pointwise=tuple(step for step in reversed(chain) if step.target not in ROW_OPS),
        softmax=softmax,
        axis=axis,
    )


def comes_from_product(node: fx.Node) -> bool:
    """Return whether a node reads a head's product, directly or through row and element-wise operators."""
    return source_product(node) is not None


def source_product(node: fx.Node) -> fx.Node | None:
    """Return the head's product that a node reads, directly or through row and element-wise operators; None if there is none."""
    chain = _chain(node)
    product = input_of(chain[-1] if chain else node)
    return product if product.target in HEADS else None


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """Strip transpositions off a matrix: return its source, and whether the matrix is the source's transpose."""
    flipped = False
    while node.target in MOVES and fake_value(node).dim() == 2:
        flipped, node = flipped != (axis_after(node, 0) == 1), input_of(node)
    return node, flipped


def _chain(node: fx.Node) -> list[fx.Node]:
    chain: list[fx.Node] = []
    source = input_of(node)
    while source.target in ROW_OPS or is_pointwise(source) or is_class_sum(source):
        chain.append(source)
        source = input_of(source)
    return chain
