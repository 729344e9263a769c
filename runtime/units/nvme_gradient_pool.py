"""Space on drives for gradients, reserved for a row of units at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from zinf_compile.ir.tiers import Tier
from zinf_compile.runtime.lanes.link_meter import Meter
from zinf_compile.runtime.memory.aligned_buffers import BufferPool
from zinf_compile.runtime.storage.engine import Engine

from .nvme_shards import NvmeShards, ShardSpec


class NvmeGradientPool:
    """Space on drives for the gradients of a row of units.

    One `NvmeShards` is laid out at once; another when a unit has two gradients at a time, as it does while they accumulate.
    """

    def __init__(
        self,
        paths: Sequence[str],
        specs: Sequence[ShardSpec],
        engine: Engine,
        meter: Meter,
        staging: BufferPool,
        *,
        piece_numel: int,
        kind: str = "gradient of",
        tier: Tier = Tier.NVME,
    ) -> None:
        self._kind, self._tier, self._piece_numel = kind, tier, piece_numel
        self._paths, self._specs, self._engine, self._meter, self._staging = paths, specs, engine, meter, staging
        self._lock = threading.RLock()  # a gradient may be dropped inside any allocation
        first = self._new_shards()
        self._free: list[list[NvmeShards]] = [[first] for _ in specs]

    def take(self, index: int) -> NvmeShards:
        """Return the `NvmeShards` in which the place of unit `index` is free; it is taken from then on."""
        with self._lock:
            if not self._free[index]:
                shards = self._new_shards()
                for free in self._free:
                    free.append(shards)
            return self._free[index].pop()

    def give_back(self, index: int, shards: NvmeShards) -> None:
        """Free a place."""
        with self._lock:
            self._free[index].append(shards)

    def _new_shards(self) -> NvmeShards:
        return NvmeShards(
            self._paths,
            self._kind,
            self._specs,
            self._engine,
            self._meter,
            self._staging,
            piece_numel=self._piece_numel,
            tier=self._tier,
        )
