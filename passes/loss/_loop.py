"""The loop over token chunks and vocabulary tiles, written out: what a loss and its gradients need of each part of the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from zinf_compile.ir.formats import is_narrower
from zinf_compile.passes.graph.alias import is_cast
from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value, mark_part, mark_region

from ._row_ops import input_of

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A part of a head: the classes from `start` up to `end`."""

    start: int
    end: int
    weight: fx.Node
    """A row for each of these classes."""
    bias: fx.Node | None


@dataclasses.dataclass(frozen=True, slots=True)
class AllClasses:
    """A quantity of each token to which all its classes contribute."""

    weights: fx.Node | None
    """One number for each class; None: all contribute alike."""
    grad: fx.Node | None
    """The quantity's gradient, a number for each token; None where none is wanted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is to be computed. Values have a row for each token."""

    hidden: fx.Node
    tiles: Sequence[Tile]
    bounds: Sequence[tuple[int, int]]
    """The first token of each chunk, and the one after its last."""
    pointwise: Sequence[fx.Node]
    """Element-wise operators between the head's product and the log-softmax: to be repeated."""
    class_terms: Mapping[fx.Node, fx.Node]
    """By the operator among them that adds it, a number for each class."""
    dtype: torch.dtype
    """In which the log-softmax is computed."""
    targets: fx.Node | None
    target_grad: fx.Node | None
    """The gradient of the log-probability at the target."""
    others: Sequence[AllClasses]
    total_grad: fx.Node | None
    """The sum of the gradients of all log-probabilities of a token, negated; None where no gradient is wanted."""
    wants: frozenset[str]
    """Of which gradients are wanted: "hidden", "weight", "bias"."""


@dataclasses.dataclass(slots=True)
class Swept:
    """What came out of it."""

    picked: list[fx.Node] = dataclasses.field(default_factory=list)
    """Of each chunk, the log-probabilities at the targets."""
    sums: list[list[fx.Node]] = dataclasses.field(default_factory=list)
    """Of each chunk, what its classes come to for each of `others`."""
    hidden: list[fx.Node] = dataclasses.field(default_factory=list)
    """Of each chunk, the gradient of its input."""
    weight: list[fx.Node] = dataclasses.field(default_factory=list)
    """Of each tile, the gradient of its rows."""
    bias: list[fx.Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of some tokens; what is one number for each token is a column."""

    bounds: tuple[int, int]
    hidden: fx.Node
    targets: fx.Node | None
    target_grad: fx.Node | None
    total_grad: fx.Node | None
    others: Sequence[fx.Node | None]


def cut_chunks(insert: NodeBuilder, sweep: Sweep) -> list[Chunk]:
    """Slice what has a row for each token, all before the first chunk: so the chunks themselves are alike, and compile once."""
    columns = [
        None if n is None else insert(aten.unsqueeze.default, n, 1)
        for n in (sweep.targets, sweep.target_grad, sweep.total_grad, *(other.grad for other in sweep.others))
    ]

    def rows(node: fx.Node | None, start: int, end: int) -> fx.Node | None:
        return node if node is None or len(sweep.bounds) == 1 else insert(aten.slice.Tensor, node, 0, start, end)

    chunks = []
    for start, end in sweep.bounds:
        hidden, targets, target_grad, total_grad, *others = (rows(n, start, end) for n in (sweep.hidden, *columns))
        assert hidden is not None
        chunks.append(Chunk((start, end), hidden, targets, target_grad, total_grad, others))
    return chunks


def sweep_once(insert: NodeBuilder, sweep: Sweep) -> Swept:
    """Write the loop for a head in one piece: a chunk's logits are made once, and gone before the next chunk's are made.

    Their gradient is changed in place: operator by operator, each new tensor of that size would have its pages mapped first.
    """
    (tile,) = sweep.tiles
    swept = Swept()
    for chunk in cut_chunks(insert, sweep):
        values = logits_of(insert, sweep, tile, chunk)
        log_probs = insert(aten._log_softmax.default, insert.cast(values[-1], sweep.dtype), 1, False, name="log_probs")
        if chunk.targets is not None:
            picked = insert(aten.gather.default, log_probs, 1, chunk.targets)
            swept.picked.append(insert(aten.squeeze.dim, picked, 1, name="picked"))
        swept.sums.append([sum_of(insert, log_probs, other.weights) for other in sweep.others])
        if chunk.total_grad is not None:
            grad = insert(aten.mul_.Tensor, insert(aten.exp.default, log_probs), chunk.total_grad)
            grad = add_others(insert, grad, sweep, chunk, tile)
            if chunk.targets is not None and chunk.target_grad is not None:
                grad = insert(aten.scatter_add_.default, grad, 1, chunk.targets, chunk.target_grad)
            grad = through_pointwise(insert, sweep, grad, values)
            if "hidden" in sweep.wants:
                swept.hidden.append(insert(aten.mm.default, grad, tile.weight, name="dhidden"))
            add_up(insert, sweep, swept, chunk, grad, number=0)
    return swept


def logits_of(insert: NodeBuilder, sweep: Sweep, tile: Tile, chunk: Chunk) -> list[fx.Node]:
    """Start a region with the product of a chunk and a tile; return it and the value after each element-wise operator."""
    hidden = insert(aten.alias.default, chunk.hidden)  # a region starts with no view of a weight: those move
    mark_region(hidden)
    transposed = insert(aten.permute.default, tile.weight, [1, 0])
    if tile.bias is None:
        logits = insert(aten.mm.default, hidden, transposed, name="logits")
    else:
        logits = insert(aten.addmm.default, tile.bias, hidden, transposed, name="logits")
    (start, end), classes = chunk.bounds, "" if len(sweep.tiles) == 1 else f", classes {tile.start} to {tile.end}"
    mark_part(logits, f"logits of tokens {start} to {end}{classes}")
    values = [logits]
    for step in sweep.pointwise:
        if step in sweep.class_terms:
            term = weights_of(insert, sweep.class_terms[step], sweep, tile)
            values.append(insert(step.target, values[-1], term))
        elif is_cast(step):
            values.append(insert.cast(values[-1], fake_value(step).dtype))
        else:
            values.append(insert(step.target, values[-1], *step.args[1:]))
    return values


def through_pointwise(insert: NodeBuilder, sweep: Sweep, grad: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
    """Take a gradient back through the element-wise operators; `values` are what was there in the forward."""
    grad = insert.cast(grad, fake_value(values[-1]).dtype)
    for number, step in reversed(list(enumerate(sweep.pointwise))):
        if step in sweep.class_terms:
            continue
        if is_cast(step):
            grad = insert.cast(grad, fake_value(input_of(step)).dtype)
        elif step.target is aten.tanh.default:
            grad = insert(aten.tanh_backward.default, grad, values[number + 1])
        else:
            grad = insert(step.target, grad, *step.args[1:])
    return grad


def sum_of(insert: NodeBuilder, values: fx.Node, weights: fx.Node | None) -> fx.Node:
    """Write the sum over classes."""
    weighted = values if weights is None else insert(aten.mul.Tensor, values, weights)
    return insert(aten.sum.dim_IntList, weighted, [1])


def weights_of(insert: NodeBuilder, weights: fx.Node | None, sweep: Sweep, tile: Tile) -> fx.Node | None:
    """Return the weights of a tile's classes."""
    return weights if weights is None or len(sweep.tiles) == 1 else insert(aten.slice.Tensor, weights, 0, tile.start, tile.end)


def add_others(insert: NodeBuilder, grad: fx.Node, sweep: Sweep, chunk: Chunk, tile: Tile) -> fx.Node:
    """Add the gradients that reach all classes."""
    for other, column in zip(sweep.others, chunk.others, strict=True):
        if column is not None:
            weights = weights_of(insert, other.weights, sweep, tile)
            part = column if weights is None else insert(aten.mul.Tensor, column, weights)
            grad = insert(aten.add_.Tensor, grad, part)
    return grad


def add_up(insert: NodeBuilder, sweep: Sweep, swept: Swept, chunk: Chunk, grad: fx.Node, *, number: int) -> None:
    """Add a chunk's part to the gradients of a tile's weight and bias, in place: a copy would cost as much as the chunk.

    Parts in 16 bits are added up in fp32, since each sum would be rounded anew.
    """
    if "weight" in sweep.wants:
        factors = insert(aten.permute.default, grad, [1, 0]), chunk.hidden
        short = is_narrower(fake_value(grad).dtype, torch.float32)
        if len(swept.weight) == number:
            part = insert(aten.mm.default, *factors, name="dweight")
            swept.weight.append(insert.cast(part, torch.float32) if short else part)
        elif short:
            part = insert(aten.mm.default, *factors)
            swept.weight[number] = insert(aten.add_.Tensor, swept.weight[number], part, name="dweight")
        else:
            swept.weight[number] = insert(aten.addmm_.default, swept.weight[number], *factors, name="dweight")
    if "bias" in sweep.wants:
        part = insert(aten.sum.dim_IntList, insert.cast(grad, sweep.dtype), [0])
        if len(swept.bias) == number:
            swept.bias.append(part)
        else:
            swept.bias[number] = insert(aten.add.Tensor, swept.bias[number], part, name="dbias")
