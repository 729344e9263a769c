"""Operators of one chunk of a loss, and the loop over chunks for a head in one piece.

`_rewrite` calls it with values that have one row per token; `_loop_tiles` shares the operators of a chunk.
"""

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
    """A part of a head: classes [start, end)."""

    start: int
    end: int
    weight: fx.Node
    """One row per class."""
    bias: fx.Node | None


@dataclasses.dataclass(frozen=True, slots=True)
class AllClasses:
    """A sum of each token's log-probabilities over all classes, or the gradient of such a sum."""

    weights: fx.Node | None
    """One number per class; None for equal weights."""
    grad: fx.Node | None
    """The gradient of the sum, one number per token; None if no gradient is wanted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopInputs:
    """Inputs of the loop. Values have one row per token."""

    hidden: fx.Node
    tiles: Sequence[Tile]
    bounds: Sequence[tuple[int, int]]
    """[start, end) of each chunk, in tokens."""
    pointwise: Sequence[fx.Node]
    """Element-wise operators between the head's product and the log-softmax, repeated for each chunk."""
    class_terms: Mapping[fx.Node, fx.Node]
    """For each element-wise operator that adds one number per class, these numbers."""
    dtype: torch.dtype
    """Of the log-softmax."""
    targets: fx.Node | None
    target_grad: fx.Node | None
    """The gradient of the log-probability at the target."""
    others: Sequence[AllClasses]
    total_grad: fx.Node | None
    """The negated sum of a token's log-probability gradients; None if no gradient is wanted."""
    wants: frozenset[str]
    """Gradients to compute: of "hidden", "weight", "bias"."""


@dataclasses.dataclass(slots=True)
class LoopResults:
    """Results of the loop."""

    picked: list[fx.Node] = dataclasses.field(default_factory=list)
    """Per chunk: the log-probabilities at the targets."""
    sums: list[list[fx.Node]] = dataclasses.field(default_factory=list)
    """Per chunk: one sum for each of `others`."""
    hidden: list[fx.Node] = dataclasses.field(default_factory=list)
    """Per chunk: the gradient of its input."""
    weight: list[fx.Node] = dataclasses.field(default_factory=list)
    """Per tile: the gradient of its rows."""
    bias: list[fx.Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of a chunk's tokens. Values of one number per token are columns."""

    bounds: tuple[int, int]
    hidden: fx.Node
    targets: fx.Node | None
    target_grad: fx.Node | None
    total_grad: fx.Node | None
    others: Sequence[fx.Node | None]


def cut_chunks(insert: NodeBuilder, loop: LoopInputs) -> list[Chunk]:
    """Slice the values of all chunks in front of the first one, so that chunks are equal regions and compile once."""
    columns = [
        None if n is None else insert(aten.unsqueeze.default, n, 1)
        for n in (loop.targets, loop.target_grad, loop.total_grad, *(other.grad for other in loop.others))
    ]

    def rows(node: fx.Node | None, start: int, end: int) -> fx.Node | None:
        return node if node is None or len(loop.bounds) == 1 else insert(aten.slice.Tensor, node, 0, start, end)

    chunks = []
    for start, end in loop.bounds:
        hidden, targets, target_grad, total_grad, *others = (rows(n, start, end) for n in (loop.hidden, *columns))
        assert hidden is not None
        chunks.append(Chunk((start, end), hidden, targets, target_grad, total_grad, others))
    return chunks


def loop_over_chunks(insert: NodeBuilder, loop: LoopInputs) -> LoopResults:
    """Write the loop for a head in one piece: each chunk's logits are computed once and freed before the next chunk.

    Their gradient is updated in place. A new tensor for each operator would cost page faults of its whole size.
    """
    (tile,) = loop.tiles
    results = LoopResults()
    for chunk in cut_chunks(insert, loop):
        values = logits_of(insert, loop, tile, chunk)
        log_probs = insert(aten._log_softmax.default, insert.cast(values[-1], loop.dtype), 1, False, name="log_probs")
        if chunk.targets is not None:
            picked = insert(aten.gather.default, log_probs, 1, chunk.targets)
            results.picked.append(insert(aten.squeeze.dim, picked, 1, name="picked"))
        results.sums.append([sum_of(insert, log_probs, other.weights) for other in loop.others])
        if chunk.total_grad is not None:
            grad = insert(aten.mul_.Tensor, insert(aten.exp.default, log_probs), chunk.total_grad)
            grad = add_class_grads(insert, grad, loop, chunk, tile)
            if chunk.targets is not None and chunk.target_grad is not None:
                grad = insert(aten.scatter_add_.default, grad, 1, chunk.targets, chunk.target_grad)
            grad = pointwise_backward(insert, loop, grad, values)
            if "hidden" in loop.wants:
                results.hidden.append(insert(aten.mm.default, grad, tile.weight, name="dhidden"))
            accumulate_grads(insert, loop, results, chunk, grad, number=0)
    return results


def logits_of(insert: NodeBuilder, loop: LoopInputs, tile: Tile, chunk: Chunk) -> list[fx.Node]:
    """Write the product of a chunk and a tile as a region's start; return it and the result of each element-wise operator."""
    hidden = insert(aten.alias.default, chunk.hidden)  # views of weights move to their use, so they can't mark a region
    mark_region(hidden)
    transposed = insert(aten.permute.default, tile.weight, [1, 0])
    if tile.bias is None:
        logits = insert(aten.mm.default, hidden, transposed, name="logits")
    else:
        logits = insert(aten.addmm.default, tile.bias, hidden, transposed, name="logits")
    (start, end), classes = chunk.bounds, "" if len(loop.tiles) == 1 else f", classes {tile.start} to {tile.end}"
    mark_part(logits, f"logits of tokens {start} to {end}{classes}")
    values = [logits]
    for step in loop.pointwise:
        if step in loop.class_terms:
            term = weights_of(insert, loop.class_terms[step], loop, tile)
            values.append(insert(step.target, values[-1], term))
        elif is_cast(step):
            values.append(insert.cast(values[-1], fake_value(step).dtype))
        else:
            values.append(insert(step.target, values[-1], *step.args[1:]))
    return values


def pointwise_backward(insert: NodeBuilder, loop: LoopInputs, grad: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
    """Write the backward of the element-wise operators; `values` are the results of `logits_of`."""
    grad = insert.cast(grad, fake_value(values[-1]).dtype)
    for number, step in reversed(list(enumerate(loop.pointwise))):
        if step in loop.class_terms:
            continue
        if is_cast(step):
            grad = insert.cast(grad, fake_value(input_of(step)).dtype)
        elif step.target is aten.tanh.default:
            grad = insert(aten.tanh_backward.default, grad, values[number + 1])
        else:
            grad = insert(step.target, grad, *step.args[1:])
    return grad


def sum_of(insert: NodeBuilder, values: fx.Node, weights: fx.Node | None) -> fx.Node:
    """Write the weighted sum over classes."""
    weighted = values if weights is None else insert(aten.mul.Tensor, values, weights)
    return insert(aten.sum.dim_IntList, weighted, [1])


def weights_of(insert: NodeBuilder, weights: fx.Node | None, loop: LoopInputs, tile: Tile) -> fx.Node | None:
    """Return the weights of a tile's classes."""
    return weights if weights is None or len(loop.tiles) == 1 else insert(aten.slice.Tensor, weights, 0, tile.start, tile.end)


def add_class_grads(insert: NodeBuilder, grad: fx.Node, loop: LoopInputs, chunk: Chunk, tile: Tile) -> fx.Node:
    """Add the gradients of sums over all classes."""
    for other, column in zip(loop.others, chunk.others, strict=True):
        if column is not None:
            weights = weights_of(insert, other.weights, loop, tile)
            part = column if weights is None else insert(aten.mul.Tensor, column, weights)
            grad = insert(aten.add_.Tensor, grad, part)
    return grad


def accumulate_grads(
    insert: NodeBuilder, loop: LoopInputs, results: LoopResults, chunk: Chunk, grad: fx.Node, *, number: int
) -> None:
    """Accumulate the gradients of tile `number`'s weight and bias in place: a copy would cost as much as the chunk.

    Parts in 16 bits accumulate in fp32, since otherwise each sum would be rounded.
    """
    if "weight" in loop.wants:
        factors = insert(aten.permute.default, grad, [1, 0]), chunk.hidden
        short = is_narrower(fake_value(grad).dtype, torch.float32)
        if len(results.weight) == number:
            part = insert(aten.mm.default, *factors, name="dweight")
            results.weight.append(insert.cast(part, torch.float32) if short else part)
        elif short:
            part = insert(aten.mm.default, *factors)
            results.weight[number] = insert(aten.add_.Tensor, results.weight[number], part, name="dweight")
        else:
            results.weight[number] = insert(aten.addmm_.default, results.weight[number], *factors, name="dweight")
    if "bias" in loop.wants:
        part = insert(aten.sum.dim_IntList, insert.cast(grad, loop.dtype), [0])
        if len(results.bias) == number:
            results.bias.append(part)
        else:
            results.bias[number] = insert(aten.add.Tensor, results.bias[number], part, name="dbias")
