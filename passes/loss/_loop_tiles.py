"""The loop for a head in several tiles: no chunk ever has all its classes at once."""

from __future__ import annotations

import torch
from torch import fx

from zinf_compile.passes.graph.build_nodes import NodeBuilder
from zinf_compile.passes.graph.node_facts import fake_value

from ._loop import Chunk, Sweep, Swept, Tile, add_others, add_up, cut_chunks, logits_of, sum_of, through_pointwise, weights_of

aten = torch.ops.aten


def sweep_twice(insert: NodeBuilder, sweep: Sweep) -> Swept:
    """Write two loops over the tiles, each tile's chunks together, so that each tile is there twice: one for the logarithm of
    each token's sum of exponentials, which is corrected as larger logits are met, and one, with the logits made again, for the
    gradients."""
    chunks = cut_chunks(insert, sweep)
    found = [_Found(sweep) for _ in chunks]
    for tile in sweep.tiles:
        for chunk, so_far in zip(chunks, found, strict=True):
            so_far.add(insert, sweep, tile, chunk)
    swept = Swept()
    logs = []
    for so_far in found:
        assert so_far.largest is not None
        assert so_far.total is not None
        log = insert(aten.add.Tensor, _finite(insert, so_far.largest), insert(aten.log.default, so_far.total))
        if so_far.picked is not None:
            swept.picked.append(insert(aten.squeeze.dim, insert(aten.sub.Tensor, so_far.picked, log), 1, name="picked"))
        sums = zip(so_far.sums, sweep.others, strict=True)
        swept.sums.append([_minus(insert, total, log, other.weights, sweep) for total, other in sums])
        logs.append(log)
    if sweep.total_grad is not None:
        _gradients(insert, sweep, swept, chunks, logs)
    return swept


class _Found:
    """What is known of a chunk after some tiles."""

    def __init__(self, sweep: Sweep) -> None:
        self.largest: fx.Node | None = None
        self.total: fx.Node | None = None
        """Of the exponentials of the logits less the largest one."""
        self.picked: fx.Node | None = None
        self.sums: list[fx.Node] = []

    def add(self, insert: NodeBuilder, sweep: Sweep, tile: Tile, chunk: Chunk) -> None:
        """Go on with a tile."""
        logits = insert.cast(logits_of(insert, sweep, tile, chunk)[-1], sweep.dtype)
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
            inside, place = _place(insert, chunk.targets, tile)
            picked = insert(aten.gather.default, logits, 1, place)
            picked = insert(aten.where.self, inside, picked, insert.zeros([], logits, sweep.dtype))
            self.picked = picked if self.picked is None else insert(aten.add.Tensor, self.picked, picked)
        sums = [sum_of(insert, logits, weights_of(insert, other.weights, sweep, tile)) for other in sweep.others]
        self.sums = [insert(aten.add.Tensor, a, b) for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums


def _gradients(insert: NodeBuilder, sweep: Sweep, swept: Swept, chunks: list[Chunk], logs: list[fx.Node]) -> None:
    for number, tile in enumerate(sweep.tiles):
        for place_of_chunk, (chunk, log) in enumerate(zip(chunks, logs, strict=True)):
            values = logits_of(insert, sweep, tile, chunk)
            log_probs = insert(aten.sub.Tensor, insert.cast(values[-1], sweep.dtype), log)
            grad = insert(aten.mul_.Tensor, insert(aten.exp.default, log_probs), chunk.total_grad)
            grad = add_others(insert, grad, sweep, chunk, tile)
            if chunk.targets is not None and chunk.target_grad is not None:
                inside, place = _place(insert, chunk.targets, tile)
                at_target = insert(aten.where.self, inside, chunk.target_grad, insert.zeros([], grad, sweep.dtype))
                grad = insert(aten.scatter_add_.default, grad, 1, place, at_target)
            grad = through_pointwise(insert, sweep, grad, values)
            if "hidden" in sweep.wants:
                part = insert(aten.mm.default, grad, tile.weight, name="dhidden")
                part = insert.cast(part, torch.promote_types(fake_value(part).dtype, torch.float32))
                if number == 0:
                    swept.hidden.append(part)
                else:
                    swept.hidden[place_of_chunk] = insert(aten.add.Tensor, swept.hidden[place_of_chunk], part)
            add_up(insert, sweep, swept, chunk, grad, number=number)


def _finite(insert: NodeBuilder, largest: fx.Node) -> fx.Node:
    """Return the largest logits, 0 where all are -inf: that less itself is no number."""
    return insert(aten.where.ScalarSelf, insert(aten.eq.Scalar, largest, float("-inf")), 0.0, largest)


def _place(insert: NodeBuilder, targets: fx.Node, tile: Tile) -> tuple[fx.Node, fx.Node]:
    """Return which targets lie in a tile, and where in it; 0 for the others."""
    shifted = insert(aten.sub.Tensor, targets, tile.start)
    inside = insert(
        aten.logical_and.default, insert(aten.ge.Scalar, shifted, 0), insert(aten.lt.Scalar, shifted, tile.end - tile.start)
    )
    return inside, insert(aten.where.ScalarOther, inside, shifted, 0)


def _minus(insert: NodeBuilder, total: fx.Node, log: fx.Node, weights: fx.Node | None, sweep: Sweep) -> fx.Node:
    """Turn a sum of logits into one of log-probabilities."""
    log = insert(aten.squeeze.dim, log, 1)
    share = sweep.tiles[-1].end if weights is None else insert(aten.sum.default, weights)
    return insert(aten.sub.Tensor, total, insert(aten.mul.Tensor, log, share))
