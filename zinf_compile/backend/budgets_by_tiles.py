"""Budgets of one captured graph under other caps: those whose default tiles cut its parameters alike need as much.

`GraphBudget` asks for them where the graph does not fit, to name the smallest cap that works; `graph_compiler` traces it.

Note: caps with the same tiles
    A smaller cap changes what is decided about a graph, too: where parameters live, and what becomes of saved values. But while
    none of the choices fits, the one that lacks least is taken. With a larger cap that one lacks less by as much as the cap grew,
    any other by no more: it stays the least up to what it needs. Larger caps are asked for only to see that less would do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from zinf_compile.config import Config
from zinf_compile.ir.compute_shape import piece_of
from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.context import Context
from zinf_compile.runtime.system.node import ranks_of_node
from zinf_compile.sharded.budget import GraphBudget

from .capture import Captured, cut_into_tiles

Measure = Callable[[Config, Captured], GraphBudget]


class BudgetsByTiles:
    """The budgets of one captured graph, by the tiles of its parameters."""

    def __init__(
        self,
        config: Config,
        captured: Captured,
        inputs: Sequence[object],
        context: Context,
        budget: GraphBudget,
        measure: Measure,
        *,
        shards: int | None,
        together: bool,
    ) -> None:
        """`config`, `captured` and `budget`: of the graph as it was compiled. `measure` traces it with others.

        `shards`: the elements of a rank's shards, from which pieces follow as well; None where these are given. `together`:
        all ranks compile it at the same point.
        """
        follows = shards is not None and config.shape().piece_numel == piece_of(shards, config.device_bytes)
        self._shards = shards if follows else None  # else parameters were partitioned with another piece
        self._config, self._captured, self._inputs, self._context = config, captured, inputs, context
        self._measure, self._unseen = measure, bool(budget.unseen)
        self._known: dict[Hashable, GraphBudget] = {}
        alone = context.size == 1 or not together
        if alone and budget.works(Tier.DEVICE) > budget.device_cap:
            self._known[self._key(config, captured)] = budget

    def __call__(self, device_memory: int) -> GraphBudget:
        """Return the budget with another `device_memory` and the tiles that follow from it."""
        config = dataclasses.replace(self._with_shape_of(device_memory), device_memory=device_memory)
        captured = self._cut(config)
        key = self._key(config, captured)
        if key not in self._known:
            self._known[key] = self._measure(config, captured)
        return self._known[key]

    def within(self, device_memory: int, host_memory: int) -> GraphBudget:
        """Return the budget within both caps of each rank, and with the tiles that follow from the device's."""
        host = host_memory * ranks_of_node()
        config = dataclasses.replace(self._with_shape_of(device_memory), device_memory=device_memory, host_memory=host)
        return self._measure(config, self._cut(config))

    def cut_as(self, device_memory: int) -> Config:
        """Return the graph's own configuration, with the tiles and the piece of another `device_memory`."""
        config = self._with_shape_of(device_memory)
        return dataclasses.replace(config, tile=dataclasses.replace(config, device_memory=device_memory).tile_bytes)

    def _cut(self, config: Config) -> Captured:
        group = self._context.ranks.shard_group
        return cut_into_tiles(self._captured, self._inputs, config.placement(), group, from_placement=True)

    def _with_shape_of(self, device_memory: int) -> Config:
        config = dataclasses.replace(self._config, tile=None)
        return config if self._shards is None else config.with_piece(piece_of(self._shards, device_memory))

    def _key(self, config: Config, captured: Captured) -> Hashable:
        slots = list(captured.slots.values())
        tile = config.tile_bytes if self._unseen else None  # those of other graphs may be cut
        shape = config.shape()
        return shape.bucket_of(slots), shape.piece_numel, tile, *(slot.tiles for slot in slots)
