"""A unit's shards to its flat whole and back, in one call on the lane of gathers. Collective operations."""

from __future__ import annotations

import torch

from .unit import Unit


def gather_whole(unit: Unit, shard: torch.Tensor, full: torch.Tensor, what: str) -> None:
    """Fill `full`, which comes from `Context.full_buffer`, on all ranks."""
    shards, fulls = unit.split(shard, full)
    context, gathers = unit.context, unit.gathers
    context.finish(context.lanes.gather.submit(lambda: gathers.all_gather(shards, fulls)), what)


def gather_on_first(unit: Unit, shard: torch.Tensor, full: torch.Tensor | None, what: str) -> None:
    """Fill `full` on rank 0."""
    shards, fulls = unit.split(shard, shard if full is None else full)
    context, gathers = unit.context, unit.gathers

    def gather() -> None:
        for part, whole in zip(shards, fulls, strict=True):
            gathers.gather(part, None if full is None else whole)

    context.finish(context.lanes.gather.submit(gather), what)


def scatter_whole(unit: Unit, full: torch.Tensor | None, shard: torch.Tensor, what: str) -> None:
    """Fill each rank's shard from rank 0's `full`."""
    shards, fulls = unit.split(shard, shard if full is None else full)
    context, gathers = unit.context, unit.gathers

    def scatter() -> None:
        for part, whole, span in zip(shards, fulls, unit.spans, strict=True):
            gathers.scatter(None if full is None else whole, part, span.end - span.start)

    context.finish(context.lanes.gather.submit(scatter), what)
