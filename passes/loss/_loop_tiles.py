"""Loops of a loss whose head is in several tiles: logits exist for one chunk and one tile at a time."""

from __future__ import annotations

import torch
from torch import fx

from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value

from ._loop import (
    Chunk,
    LoopInputs,
    LoopResults,
    Tile,
    accumulate_grads,
    add_class_grads,
    cut_chunks,
    logits_of,
    pointwise_backward,
    sum_of,
    weights_of,
)

aten = torch.ops.aten


def loop_over_tiles(insert: NodeBuilder, loop: LoopInputs) -> LoopResults:
    """Write two loops over tiles, each with an inner loop over chunks, so that a tile is gathered twice.

    Note: online log-sum-exp
        The first loop computes each token's log-sum-exp. It keeps the largest logit so far and the sum of exponentials relative
        to it, and rescales that sum when a tile has a larger one. The second loop recomputes the logits and writes the gradients.
    """
    chunks = cut_chunks(insert, loop)
    found = [_RunningSums(loop) for _ in chunks]
    for tile in loop.tiles:
        for chunk, so_far in zip(chunks, found, strict=True):
            so_far.add(insert, loop, tile, chunk)
    results = LoopResults()
    logs = []
    for so_far in found:
        assert so_far.largest is not None
        assert so_far.total is not None
        log = insert(aten.add.Tensor, _finite(insert, so_far.largest), insert(aten.log.default, so_far.total))
        if so_far.picked is not None:
            results.picked.append(insert(aten.squeeze.dim, insert(aten.sub.Tensor, so_far.picked, log), 1, name="picked"))
        sums = zip(so_far.sums, loop.others, strict=True)
        results.sums.append([_log_prob_sum(insert, total, log, other.weights, loop) for total, other in sums])
        logs.append(log)
    if loop.total_grad is not None:
        _gradients(insert, loop, results, chunks, logs)
    return results


class _RunningSums:
    """Running largest logit and sums of one chunk, over the tiles so far."""

    def __init__(self, loop: LoopInputs) -> None:
        self.largest: fx.Node | None = None
        self.total: fx.Node | None = None
        """Sum of exp(logit - largest)."""
        self.picked: fx.Node | None = None
        self.sums: list[fx.Node] = []

    def add(self, insert: NodeBuilder, loop: LoopInputs, tile: Tile, chunk: Chunk) -> None:
        """Add the logits of one tile."""
        logits = insert.cast(logits_of(insert, loop, tile, chunk)[-1], loop.dtype)
        largest = insert(aten.amax.default, logits, [1], True)
        if self.largest is not None:
            largest = insert(aten.maximum.default, self.largest, largest)
        finite = _finite(insert, largest)
        exponentials = insert(aten.exp.default, insert(aten.sub.Tensor, logits, finite))
        total = insert(aten.sum.dim_IntList, exponentials, [1], True)
        if self.largest is not None and self.total is not None:
            corrected = insert(aten.exp.default, insert(aten.sub.Tensor, self.largest, finite))
            total = insert(aten.add.Tensor, insert(aten.mul.Tensor, self.total, corrected), total)
        self.largest, self.total = largest, total
        if chunk.targets is not None:
            inside, index = _index_in_tile(insert, chunk.targets, tile)
            picked = insert(aten.gather.default, logits, 1, index)
            picked = insert(aten.where.self, inside, picked, insert.zeros([], logits, loop.dtype))
            self.picked = picked if self.picked is None else insert(aten.add.Tensor, self.picked, picked)
        sums = [sum_of(insert, logits, weights_of(insert, other.weights, loop, tile)) for other in loop.others]
        self.sums = [insert(aten.add.Tensor, a, b) for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums


def _gradients(insert: NodeBuilder, loop: LoopInputs, results: LoopResults, chunks: list[Chunk], logs: list[fx.Node]) -> None:
    for number, tile in enumerate(loop.tiles):
        for chunk_number, (chunk, log) in enumerate(zip(chunks, logs, strict=True)):
            values = logits_of(insert, loop, tile, chunk)
            log_probs = insert(aten.sub.Tensor, insert.cast(values[-1], loop.dtype), log)
            grad = insert(aten.mul_.Tensor, insert(aten.exp.default, log_probs), chunk.total_grad)
            grad = add_class_grads(insert, grad, loop, chunk, tile)
            if chunk.targets is not None and chunk.target_grad is not None:
                inside, index = _index_in_tile(insert, chunk.targets, tile)
                at_target = insert(aten.where.self, inside, chunk.target_grad, insert.zeros([], grad, loop.dtype))
                grad = insert(aten.scatter_add_.default, grad, 1, index, at_target)
            grad = pointwise_backward(insert, loop, grad, values)
            if "hidden" in loop.wants:
                part = insert(aten.mm.default, grad, tile.weight, name="dhidden")
                part = insert.cast(part, torch.promote_types(fake_value(part).dtype, torch.float32))
                if number == 0:
                    results.hidden.append(part)
                else:
                    results.hidden[chunk_number] = insert(aten.add.Tensor, results.hidden[chunk_number], part)
            accumulate_grads(insert, loop, results, chunk, grad, number=number)


def _finite(insert: NodeBuilder, largest: fx.Node) -> fx.Node:
    """Return the largest logits, with 0 for -inf: -inf - -inf is NaN."""
    return insert(aten.where.ScalarSelf, insert(aten.eq.Scalar, largest, float("-inf")), 0.0, largest)


def _index_in_tile(insert: NodeBuilder, targets: fx.Node, tile: Tile) -> tuple[fx.Node, fx.Node]:
    """Return a mask of the targets in a tile, and their indices in it, 0 for the others."""
    shifted = insert(aten.sub.Tensor, targets, tile.start)
    inside = insert(
        aten.logical_and.default, insert(aten.ge.Scalar, shifted, 0), insert(aten.lt.Scalar, shifted, tile.end - tile.start)
    )
    return inside, insert(aten.where.ScalarOther, inside, shifted, 0)


def _log_prob_sum(insert: NodeBuilder, total: fx.Node, log: fx.Node, weights: fx.Node | None, loop: LoopInputs) -> fx.Node:
    """Return a sum of log-probabilities, given the sum of logits and the log-sum-exp."""
    log = insert(aten.squeeze.dim, log, 1)
    share = loop.tiles[-1].end if weights is None else insert(aten.sum.default, weights)
    return insert(aten.sub.Tensor, total, insert(aten.mul.Tensor, log, share))
